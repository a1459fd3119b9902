"""What this process may use of its machine: memory and cores, by the smallest limit above it.

    /proc/self/cgroup --path--> /sys/fs/cgroup/a/b/c    v2: one tree;  v1: a tree for each controller
                                  each group from c up to the tree's root may have a limit: the
                                  smallest counts, and what is used below that same group

A container without a cgroup namespace reads a path of the host's there and sees only its own part
of the tree, so a path counts from the first of its names on that leads to a group.
`root` is where tests have made-up trees.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # v1 writes the largest multiple of a page instead of "max"
_GROUPS = Path("sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """``limit``: bytes that may be used at all by all who share it; ``available``: of them, what can
    be allocated without anybody being killed for it. ``where``: what sets the limit, in words."""

    limit: int
    available: int
    where: str


@dataclass(frozen=True)
class Cores:
    """``usable``: whole cores' time that this process gets; ``present``: cores that it may run on."""

    usable: int
    present: int


def memory(root: Path = Path("/")) -> Memory:
    """The machine's memory, or what the narrowest control group leaves of it."""
    info = _table(root / "proc/meminfo", ":")
    total, free = info["MemTotal"] << 10, info["MemAvailable"] << 10
    found = [Memory(total, free, "this machine's memory")]
    for group in _groups(root, "memory"):
        limits = [
            limit
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            if (limit := _number(group / name)) is not None and limit < min(total, _UNLIMITED)
        ]
        if limits:
            shown = group.relative_to(root)
            found.append(
                Memory(
                    min(limits),
                    max(min(limits) - _in_use(group), 0),
                    f"the memory limit of the control group /{shown}",
                )
            )
    least = min(found, key=lambda one: one.limit)
    return Memory(least.limit, min(one.available for one in found), least.where)


def cores(root: Path = Path("/")) -> Cores:
    """Cores of this process's CPU set, or what the smallest quota leaves of them (at least 1)."""
    present = len(os.sched_getaffinity(0))
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cpu_quota(group)) is not None]
    return Cores(max(int(min([present, *quotas])), 1), present)


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """Processes that the kernel has ended in this process's groups because a limit was reached."""
    return sum(
        _table(group / name, " ").get("oom_kill", 0)
        for group in _groups(root, "memory")
        for name in ("memory.events", "memory.oom_control")
    )


def shared_memory(root: Path = Path("/")) -> int:
    """Bytes free in /dev/shm, which container engines make small; 0 where there is none."""
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control groups that this process is in, from the innermost to the root of the tree."""
    top = root / _GROUPS
    for line in _lines(root / "proc/self/cgroup"):
        names, _, path = line.partition(":")[2].partition(":")
        if not names:
            trees = [top] if (top / "cgroup.controllers").exists() else []
        elif controller in names.split(","):
            trees = [tree for tree in (top / names, top / controller) if tree.is_dir()][:1]
        else:
            continue
        for tree in trees:
            yield from _upwards(tree, path)


def _upwards(tree: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for skipped in range(len(parts)):
        group = tree.joinpath(*parts[skipped:])
        if group.is_dir():
            while group != tree:
                yield group
                group = group.parent
            break
    yield tree


def _in_use(group: Path) -> int:
    """Bytes that cannot be had back by letting go of files' pages that nobody has read lately."""
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    stat = _table(group / "memory.stat", " ")
    cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))  # v1 has both
    return max(used - cached, 0)


def _cpu_quota(group: Path) -> float | None:
    """Cores' time a group may take; None where it has no quota."""
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    for line in _lines(group / "cpu.max"):
        fields = line.split()
        if len(fields) == 2:
            quota, period = _whole(fields[0]), _whole(fields[1])
    return quota / period if quota and period and quota > 0 else None


def _lines(path: Path) -> list[str]:
    """Nothing for a file that is not there or may not be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """None for ``max``, and where there is no such file."""
    lines = _lines(path)
    return _whole(lines[0].strip()) if lines else None


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _table(path: Path, separator: str) -> dict[str, int]:
    """Names and whole numbers, one a line; units are left out."""
    found = {}
    for line in _lines(path):
        name, _, rest = line.partition(separator)
        fields = rest.split()
        if fields and (value := _whole(fields[0])) is not None:
            found[name] = value
    return found
