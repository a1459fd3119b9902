"""A container made by hand, of what engines make them: namespaces, control groups, a seccomp filter.

/ (read-only)   libraries, the interpreter and this repository;  no compiler, no home, no /tmp
/writable       the one directory that may be written
/dev/shm        64 KiB
uid 54321, no capabilities, no pidfd_open;  limits on memory and CPU time by real control groups
where they may be made (as root, v1 or v2), else by a made-up tree in their place
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.serving import DEADLINE_S, Served

UID = 54321
REPOSITORY = Path(__file__).parent.parent
GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
# $1: the new root; $2: what is /writable, or empty; $3: a made-up tree of groups, or empty; then
# directories to show, --, and the command.
_MAKE = """
set -e
root=$1 writable=$2 groups=$3; shift 3
mount -t tmpfs -o mode=755 box "$root"
while [ "$1" != -- ]; do
  mkdir -p "$root$1"; mount --bind "$1" "$root$1"; mount -o remount,bind,ro "$root$1"; shift
done
shift
mkdir -p "$root/proc" "$root/dev/shm" "$root/sys/fs/cgroup" "$root/writable"
mount -t proc proc "$root/proc"
mount -t tmpfs -o size=64k shm "$root/dev/shm"
for device in null zero random urandom; do
  : >"$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"
done
mount --rbind "${groups:-/sys/fs/cgroup}" "$root/sys/fs/cgroup"
[ -z "$writable" ] || mount --bind "$writable" "$root/writable"
mount -o remount,ro "$root"
exec chroot --userspec=USER:USER --groups= "$root" "$@"
""".replace("USER", str(UID))
_INSIDE = (
    "import errno, os, sys; from tests.seccomp import PIDFD_OPEN, refuse; "
    "refuse(PIDFD_OPEN, errno.EPERM); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@dataclass(frozen=True)
class Limits:
    memory: int
    cores: float = 1.0


def can_be_made() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, ("unshare", "chroot", "mount")))


@contextlib.contextmanager
def boxed(
    directory: Path, limits: Limits, *arguments: str, may_write: bool = True, **environment: str
) -> Iterator[Served]:
    """`python ARGUMENTS` in a container; its model and cache belong below ``directory``/writable,
    which it sees as /writable."""
    root, writable = directory / "root", directory / "writable"
    for made in (root, writable):
        made.mkdir(exist_ok=True)
    for path in (writable, *writable.rglob("*")):
        os.chown(path, UID, UID)
    shown = [sys.base_prefix, sys.prefix, str(REPOSITORY), *map(str, directory.glob("shown"))]
    shown += [path for path in ("/usr/lib", "/lib", "/lib64", "/usr/lib64") if os.path.isdir(path)]
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(REPOSITORY)}
    environment |= {"PATH": os.environ["PATH"]}  # for the shell; there is nothing of it inside
    with _groups(directory, limits) as (enter, made_up):
        command = [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", enter + _MAKE),
            *("sh", str(root), str(writable) if may_write else "", made_up, *dict.fromkeys(shown)),
            *("--", sys.executable, "-c", _INSIDE, *arguments),
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        try:
            yield Served(process)
        finally:
            running = process.poll() is None
            family = psutil.Process(process.pid).children(recursive=True) if running else []
            process.kill()  # and with it all of its namespace
            process.wait()
            psutil.wait_procs(family, DEADLINE_S)


@contextlib.contextmanager
def _groups(directory: Path, limits: Limits) -> Iterator[tuple[str, str]]:
    """What a shell runs to enter the groups, and a made-up tree where there can be none."""
    made: list[Path] = []
    try:
        try:
            _make_groups(limits, made)
            enter, tree = "".join(f"echo $$ >{group}/cgroup.procs\n" for group in made), ""
        except OSError:
            enter, tree = "", _make_up(directory / "groups", limits)
        yield enter, tree
    finally:
        for group in made:
            group.rmdir()


def _make_groups(limits: Limits, made: list[Path]) -> None:
    name = f"forebay-test-{os.getpid()}"

    def make(group: Path, **values: object) -> None:
        group.mkdir()
        made.append(group)
        for file, value in values.items():
            (group / file.replace("_", ".", 1)).write_text(str(value))

    quota = int(limits.cores * PERIOD_US)
    if (GROUPS / "cgroup.controllers").exists():
        make(GROUPS / name, memory_max=limits.memory, cpu_max=f"{quota} {PERIOD_US}")
    else:
        make(GROUPS / "memory" / name, memory_limit_in_bytes=limits.memory)
        make(GROUPS / "cpu" / name, cpu_cfs_quota_us=quota)


def _make_up(tree: Path, limits: Limits) -> str:
    tree.mkdir(exist_ok=True)
    (tree / "cgroup.controllers").write_text("cpu memory")
    (tree / "memory.max").write_text(str(limits.memory))
    (tree / "memory.current").write_text("0")
    (tree / "cpu.max").write_text(f"{int(limits.cores * PERIOD_US)} {PERIOD_US}")
    return str(tree)
