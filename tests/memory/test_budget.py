from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import BadArgument
from lowtide.memory import budget
from lowtide.memory.budget import MARGIN_MIN_BYTES, Budgets, auto_bytes, memory_limits, parse_budget

GIB = 2**30
V1_UNLIMITED = "9223372036854771712\n"


class FakeSystem:
    """A root directory with just the files that "auto" reads."""

    def __init__(self, root: Path, *, available_bytes: int = 64 * GIB) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal:       {100 * GIB // 1024} kB\nMemFree:  1 kB\nMemAvailable:   {available_bytes // 1024} kB\n",
        )

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, group: str, *, limit: int | str, usage: int, inactive_file: int = 0, high: int | str = "max") -> None:
        self.write(f"sys/fs/cgroup/{group}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup/{group}/memory.high", f"{high}\n")
        self.write(f"sys/fs/cgroup/{group}/memory.current", f"{usage}\n")
        self.write(f"sys/fs/cgroup/{group}/memory.stat", f"anon 5\nfile 7\ninactive_file {inactive_file}\n")

    def v1(self, group: str, *, limit: int | str, usage: int, inactive_file: int = 0) -> None:
        self.write(f"sys/fs/cgroup/memory/{group}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"sys/fs/cgroup/memory/{group}/memory.usage_in_bytes", f"{usage}\n")
        self.write(
            f"sys/fs/cgroup/memory/{group}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}\n"
        )

    def left(self) -> int:
        return min(limit.left_bytes for limit in memory_limits(root=self.root))


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


@given(st.integers(min_value=1, max_value=2**62))
def test_an_int_is_bytes(nbytes: int) -> None:
    assert parse_budget(nbytes) == Budgets(fast_bytes=nbytes, disk_bytes=None)


def test_text_and_tiers_are_read() -> None:
    assert parse_budget("2GiB") == Budgets(fast_bytes=2 * GIB, disk_bytes=None)
    assert parse_budget({"cpu": "2GiB", "disk": "40GiB"}) == Budgets(fast_bytes=2 * GIB, disk_bytes=40 * GIB)
    assert parse_budget({"cpu": 7}) == Budgets(fast_bytes=7, disk_bytes=None)


@pytest.mark.parametrize(
    ("bad", "hint"),
    [
        (0, "more than zero"),
        (-1, "more than zero"),
        ("0", "more than zero"),
        ("0GiB", "more than zero"),
        ("-2GiB", "more than zero"),
        ("0.4B", "more than zero"),
        (True, "pass an int or a text"),
        (2.0, "pass an int or a text"),
        (None, "pass an int or a text"),
        ([1], "pass an int or a text"),
        ("2 parsecs", "unknown unit 'parsecs'"),
        ("2G", "GiB (binary) or GB (decimal)"),
        ("lots", "a number and a unit"),
        ("", "a number and a unit"),
        ({}, "no 'cpu' bytes"),
        ({"disk": "1GiB"}, "no 'cpu' bytes"),
        ({"cpu": "1GiB", "gpu": "1GiB"}, "use 'cpu' and 'disk'"),
        ({"cpu": "1GiB", 0: "1GiB"}, "use 'cpu' and 'disk'"),
        ({"cpu": "1GiB", "disk": 0}, "disk budget 0"),
        ({"cpu": "1GiB", "disk": "auto"}, "disk budget: cannot read 'auto'"),
        ({"cpu": 1.5}, "pass an int or a text"),
    ],
)
def test_a_bad_budget_is_refused_in_one_line_that_says_what_to_pass(bad: Any, hint: str) -> None:
    with pytest.raises(BadArgument) as caught:
        parse_budget(bad)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_auto_on_a_bare_host_is_what_is_available_less_a_tenth(system: FakeSystem) -> None:
    assert auto_bytes(root=system.root) == 64 * GIB - int(64 * GIB * 0.1)


def test_auto_counts_what_the_tensors_already_hold(system: FakeSystem) -> None:
    assert parse_budget("auto", held_bytes=16 * GIB, root=system.root).fast_bytes == 80 * GIB - 8 * GIB
    assert parse_budget({"cpu": " AUTO "}, held_bytes=16 * GIB, root=system.root).fast_bytes == 72 * GIB


def test_the_margin_of_a_small_machine_is_absolute(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, available_bytes=GIB)
    assert auto_bytes(root=system.root) == GIB - MARGIN_MIN_BYTES


def test_auto_refuses_when_the_margin_takes_everything(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, available_bytes=MARGIN_MIN_BYTES)
    with pytest.raises(BadArgument, match=r"finds 256 MiB \(host memory\).*state bytes"):
        auto_bytes(root=system.root)


def test_auto_without_proc_asks_for_bytes(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="state bytes"):
        parse_budget("auto", root=tmp_path)


def test_v2_every_ancestor_bounds(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "0::/user.slice/job\n")
    system.v2("user.slice/job", limit="max", usage=3 * GIB)
    system.v2("user.slice", limit=10 * GIB, usage=4 * GIB)
    assert system.left() == 6 * GIB
    system.v2("user.slice/job", limit=4 * GIB, usage=3 * GIB)
    assert system.left() == 1 * GIB
    # A container sees its own group as the root of the hierarchy, and there the root does have a limit.
    system.v2("", limit=20 * GIB, usage=19 * GIB + 512)
    assert system.left() == GIB - 512


def test_v2_throttling_limit_bounds_too(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "0::/job\n")
    system.v2("job", limit=10 * GIB, high=6 * GIB, usage=2 * GIB)
    assert system.left() == 4 * GIB


def test_cache_that_the_kernel_drops_first_is_not_usage(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "0::/job\n")
    system.v2("job", limit=10 * GIB, usage=9 * GIB, inactive_file=7 * GIB)
    assert system.left() == 8 * GIB


def test_usage_beyond_the_limit_leaves_nothing(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "0::/job\n")
    system.v2("job", limit=1 * GIB, usage=2 * GIB)
    assert system.left() == 0


def test_unlimited_v2_leaves_what_the_host_has(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "0::/a/b\n")
    system.v2("a/b", limit="max", usage=3 * GIB)
    system.v2("a", limit="max", usage=3 * GIB)
    assert [limit.source for limit in memory_limits(root=system.root)] == ["host memory"]


def test_v1_every_ancestor_bounds_and_its_unlimited_is_no_limit(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/outer/inner\n1:name=systemd:/x\n")
    system.v1("outer/inner", limit=V1_UNLIMITED.strip(), usage=GIB)
    system.v1("outer", limit=8 * GIB, usage=5 * GIB, inactive_file=2 * GIB)
    system.v1("", limit=V1_UNLIMITED.strip(), usage=50 * GIB)
    limits = memory_limits(root=system.root)
    assert [limit.source for limit in limits] == ["host memory", "cgroup v1 /outer memory.limit_in_bytes"]
    assert system.left() == 5 * GIB


def test_v1_in_a_container_that_sees_its_hosts_path(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "4:memory:/docker/abc\n0::/docker/abc\n")
    system.v1("", limit=3 * GIB, usage=GIB)
    assert system.left() == 2 * GIB


def test_hybrid_reads_memory_from_the_hierarchy_that_has_it(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "4:memory:/job\n1:name=systemd:/job\n0::/job\n")
    system.write("sys/fs/cgroup/unified/job/cgroup.procs", "1\n")
    system.v1("job", limit=5 * GIB, usage=GIB)
    assert system.left() == 4 * GIB


def test_mountinfo_says_where_the_hierarchies_are(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "4:memory:/pod/job\n0::/job\n")
    system.write(
        "proc/self/mountinfo",
        "30 1 0:1 / / rw shared:1 - ext4 /dev/root rw\n"
        "35 31 0:32 /pod /mnt/my\\040groups rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /mnt/cpu rw - cgroup cgroup rw,cpu\n"
        "41 31 0:38 / /mnt/two rw - cgroup2 cgroup2 rw\n",
    )
    system.write("mnt/my groups/job/memory.limit_in_bytes", f"{6 * GIB}\n")
    system.write("mnt/my groups/job/memory.usage_in_bytes", f"{GIB}\n")
    assert system.left() == 5 * GIB
    system.write("mnt/two/job/memory.max", f"{4 * GIB}\n")
    system.write("mnt/two/job/memory.current", f"{GIB}\n")
    assert system.left() == 3 * GIB


def test_a_group_outside_the_namespace_is_read_at_its_root(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "0::/../../elsewhere\n")
    system.v2("", limit=3 * GIB, usage=GIB)
    assert system.left() == 2 * GIB


def test_the_process_limits_bound(system: FakeSystem) -> None:
    system.write(
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max data size             {3 * GIB}           unlimited            bytes     \n"
        "Max address space         unlimited            unlimited            bytes     \n",
    )
    system.write("proc/self/status", f"Name:\tx\nVmSize:\t{9 * GIB // 1024} kB\nVmData:\t  {GIB // 1024} kB\n")
    assert [limit.source for limit in memory_limits(root=system.root)] == ["host memory", "RLIMIT_DATA"]
    assert system.left() == 2 * GIB


def test_this_machine_has_a_limit() -> None:
    limits = memory_limits()
    assert limits
    assert all(0 <= limit.left_bytes <= limit.limit_bytes for limit in limits)


def test_ranks_of_one_machine_share_what_is_left_and_not_what_each_has_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def auto(ranks: int, *limits: budget.MemoryLimit) -> int:
        monkeypatch.setattr(budget, "memory_limits", lambda **_: limits)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        return budget.parse_budget("auto").fast_bytes

    host = budget.MemoryLimit(source="host memory", limit_bytes=32 << 30, left_bytes=16 << 30)
    own = budget.MemoryLimit(source="RLIMIT_DATA", limit_bytes=8 << 30, left_bytes=8 << 30, shared=False)
    assert auto(1, host) == (16 << 30) - int(0.1 * (16 << 30))
    assert auto(4, host) == (4 << 30) - int(0.1 * (4 << 30))
    assert auto(2, own) == auto(1, own)
    assert auto(4, host, own) == auto(4, host), "a quarter of the host's is the tighter one"
    assert budget.local_ranks({"LOCAL_WORLD_SIZE": "many"}) == 1
    assert budget.local_ranks({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}) == 3


def test_stated_budgets_are_refused_where_all_ranks_cannot_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    group = budget.MemoryLimit(source="cgroup v2 / memory.max", limit_bytes=6 << 30, left_bytes=5 << 30)
    monkeypatch.setattr(budget, "memory_limits", lambda **_: (group,))
    budget.check_ranks(4 << 30, ranks=1)
    budget.check_ranks(3 << 30, ranks=2)
    with pytest.raises(BadArgument, match=r"2 ranks .* 8.00 GiB, more than the 6.00 GiB of cgroup v2 / memory.max"):
        budget.check_ranks(4 << 30, ranks=2)
