"""Memory and cores by the smallest limit above a process: made-up trees of both kinds, and what is chosen from them."""

import os
from pathlib import Path

import pytest

from forebay import machine
from forebay.machine import Cores

GIB = 1 << 30
V1_NONE = (1 << 63) - 4096


class Tree:
    """A root with /proc and /sys/fs/cgroup of a machine with 64 GiB, 48 of them free."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def groups(self, **values: object) -> None:
        """Files below /sys/fs/cgroup: ``a__memory_max`` is a/memory.max."""
        for name, value in values.items():
            *path, file = name.split("__")
            kind, _, rest = file.partition("_")
            self.write("/".join(["sys/fs/cgroup", *path, f"{kind}.{rest}"]), value)


@pytest.fixture
def v2(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    tree.write("sys/fs/cgroup/cgroup.controllers", "cpu memory")
    tree.write("proc/self/cgroup", "0::/pod/box")
    tree.write("sys/fs/cgroup/pod/box/cgroup.procs", "")
    return tree


@pytest.fixture
def v1(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    tree.write("proc/self/cgroup", "5:cpu,cpuacct:/pod/box\n4:memory:/pod/box\n0::/")
    for controller in ("cpu,cpuacct", "memory"):
        tree.write(f"sys/fs/cgroup/{controller}/pod/box/cgroup.procs", "")
    return tree


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def test_without_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    found = machine.memory(Tree(tmp_path).root)
    assert (found.limit, found.available) == (64 * GIB, 48 * GIB)
    assert found.where == "this machine's memory"


def test_the_machine_that_this_runs_on() -> None:
    found = machine.memory()
    assert (
        0
        < found.available
        <= found.limit
        <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    cores = machine.cores()
    assert 1 <= cores.usable <= cores.present == len(os.sched_getaffinity(0))


def test_the_smallest_limit_counts_wherever_it_is(v2: Tree) -> None:
    v2.groups(pod__box__memory_max="max", pod__memory_max=2 * GIB, pod__memory_current=GIB // 2)
    found = machine.memory(v2.root)
    assert (found.limit, found.available) == (2 * GIB, 3 * GIB // 2)
    assert found.where == "the memory limit of the control group /sys/fs/cgroup/pod"
    v2.groups(pod__box__memory_max=GIB, pod__box__memory_current=0)
    assert machine.memory(v2.root).limit == GIB
    v2.groups(pod__box__memory_high=GIB // 2)  # beyond it a group is slowed down until it is less
    assert machine.memory(v2.root).limit == GIB // 2


def test_what_is_free_may_be_less_in_a_wider_group(v2: Tree) -> None:
    """A pod of 4 GiB whose other containers have used 3.5."""
    v2.groups(pod__box__memory_max=2 * GIB, pod__box__memory_current=0)
    v2.groups(pod__memory_max=4 * GIB, pod__memory_current=7 * GIB // 2)
    found = machine.memory(v2.root)
    assert (found.limit, found.available) == (2 * GIB, GIB // 2)


def test_files_pages_that_can_be_had_back_are_free(v2: Tree) -> None:
    v2.groups(pod__box__memory_max=2 * GIB, pod__box__memory_current=2 * GIB)
    v2.groups(pod__box__memory_stat=f"anon 5\ninactive_file {GIB}\nactive_file 7")
    assert machine.memory(v2.root).available == GIB


def test_a_tree_of_which_only_our_part_is_mounted(v2: Tree) -> None:
    """No cgroup namespace: the path is the host's, and its beginning is not there."""
    v2.write("proc/self/cgroup", "0::/kubepods/burstable/pod/box")
    v2.groups(pod__box__memory_max=GIB)
    assert machine.memory(v2.root).limit == GIB
    v2.write("proc/self/cgroup", "0::/kubepods/elsewhere")
    v2.groups(memory_max=3 * GIB)
    assert machine.memory(v2.root).limit == 3 * GIB


def test_version_1(v1: Tree) -> None:
    v1.groups(memory__pod__box__memory_limit_in_bytes=V1_NONE)
    assert machine.memory(v1.root).limit == 64 * GIB
    v1.groups(memory__pod__memory_limit_in_bytes=2 * GIB)
    v1.groups(memory__pod__memory_usage_in_bytes=GIB)
    v1.groups(memory__pod__memory_stat=f"inactive_file 3\ntotal_inactive_file {GIB // 2}")
    found = machine.memory(v1.root)
    assert (found.limit, found.available) == (2 * GIB, 3 * GIB // 2)


def test_what_a_limit_has_killed(v2: Tree) -> None:
    assert machine.out_of_memory_kills(v2.root) == 0
    v2.groups(pod__box__memory_events="low 0\nmax 7\noom_kill 2")
    assert machine.out_of_memory_kills(v2.root) == 2


def test_what_a_limit_of_version_1_has_killed(v1: Tree) -> None:
    v1.groups(memory__pod__memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3")
    assert machine.out_of_memory_kills(v1.root) == 3


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("own", "above", "usable"),
    [
        ("max 100000", "max 100000", 8),
        ("200000 100000", "max 100000", 2),
        ("max 100000", "350000 100000", 3),
        ("600000 100000", "400000 100000", 4),
        ("20000 100000", "max 100000", 1),
        ("1600000 100000", "max 100000", 8),
        ("nonsense", "", 8),
    ],
)
def test_the_smallest_quota_counts(v2: Tree, own: str, above: str, usable: int) -> None:
    v2.groups(pod__box__cpu_max=own, pod__cpu_max=above)
    assert machine.cores(v2.root) == Cores(usable, 8)


@pytest.mark.usefixtures("eight_cores")
def test_quotas_of_version_1(v1: Tree) -> None:
    group = "sys/fs/cgroup/cpu,cpuacct/pod/box/cpu"
    v1.write(f"{group}.cfs_quota_us", -1)
    v1.write(f"{group}.cfs_period_us", 100_000)
    assert machine.cores(v1.root).usable == 8
    v1.write(f"{group}.cfs_quota_us", 250_000)
    assert machine.cores(v1.root).usable == 2
