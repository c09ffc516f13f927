"""Slow memory as a user names it: what is opened, what is refused, and what is left of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lowtide.errors import BadArgument
from lowtide.testing.stores import MediumTests
from lowtide.tiers import Medium
from lowtide.tiers import slow as slow_module
from lowtide.tiers.slow import Emulation, check_slow, open_slow

MIB = 2**20


class TestDirectory(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return open_slow(f"pmem://{tmp_path}")


class TestMemory(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return open_slow("cxl:?emulate=cxl")


def test_a_directory_has_nothing_in_it_and_optane_is_imitated(tmp_path: Path) -> None:
    medium = open_slow(f"pmem://{tmp_path}", capacity_bytes=MIB)
    assert list(tmp_path.iterdir()) == []
    assert medium.emulation == Emulation(machine="optane")
    assert medium.capacity_bytes == MIB
    medium.close()


def test_a_file_that_is_not_there_is_made_and_has_no_name(tmp_path: Path) -> None:
    medium = open_slow(f"pmem://{tmp_path}/new")
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(medium.fds[0]).st_mode) == 0o600
    medium.close()


def test_a_file_that_is_there_is_as_large_as_it_is_and_for_one_user_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.write_bytes(bytes(2 * MIB + 5))
    medium = open_slow(f"pmem://{path}")
    assert medium.capacity_bytes == 2 * MIB
    with pytest.raises(BadArgument, match="another process uses it"):
        open_slow(f"pmem://{path}")
    medium.close()
    open_slow(f"pmem://{path}").close()
    assert path.stat().st_size == 2 * MIB + 5


def test_a_file_that_is_too_small_or_not_writable_is_refused_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.write_bytes(bytes(8192))
    with pytest.raises(BadArgument, match=r"has 8\.0+ KiB, less than the 1\.00 MiB"):
        open_slow(f"pmem://{path}")
    with pytest.raises(BadArgument, match="cannot be opened for reading and writing"):
        open_slow("pmem:///proc")
    with pytest.raises(BadArgument, match="there is no directory"):
        open_slow(f"pmem://{tmp_path}/nowhere/file")
    with pytest.raises(BadArgument, match="put a filesystem with DAX on the device"):
        open_slow("pmem:///dev/zero")


def test_options_say_what_is_imitated(tmp_path: Path) -> None:
    medium = open_slow(f"pmem://{tmp_path}?emulate=cxl&scale=0.5&cache=32MiB")
    assert medium.emulation == Emulation(machine="cxl", scale=0.5, cache_bytes=32 * MIB)
    medium.close()
    medium = open_slow(f"pmem://{tmp_path}?emulate=none")
    assert medium.emulation is None
    medium.close()
    for query, reason in (("speed=1", "unknown option 'speed'"), ("scale=fast", "number"), ("scale=-1", "above 0")):
        with pytest.raises(BadArgument, match=reason):
            open_slow(f"cxl:?emulate=cxl&{query}")


def test_nodes_that_are_not_there_are_refused() -> None:
    with pytest.raises(BadArgument, match="no memory on node 4096"):
        open_slow("numa:4096")


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="the kernel does not tell of nodes")
def test_memory_of_a_node_is_bound_to_it(tmp_path: Path) -> None:
    medium = open_slow("numa:0", capacity_bytes=4 * MIB)
    assert medium.emulation is None
    medium.write_at(0, memoryview(bytes(range(256)) * 16))
    into = bytearray(4096)
    medium.read_at(0, memoryview(into))
    assert bytes(into) == bytes(range(256)) * 16
    medium.close()


def test_cxl_memory_is_a_node_without_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "has_memory").write_text("0-1\n")
    (tmp_path / "has_cpu").write_text("0\n")
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "meminfo").write_text("Node 1 MemTotal:       2048 kB\n")
    bound: list[int] = []
    monkeypatch.setattr(slow_module, "_NODES", tmp_path)
    monkeypatch.setattr(slow_module, "_bind", lambda _fd, node: bound.append(node))
    medium = open_slow("cxl:")
    assert (medium.emulation, medium.capacity_bytes, bound) == (None, 2 * MIB, [1])
    medium.close()
    (tmp_path / "has_cpu").write_text("0-1\n")
    medium = open_slow("cxl:")
    assert medium.emulation == Emulation(machine="cxl")
    medium.close()


@pytest.mark.parametrize("text", ["", "/mnt/pmem", "file:///mnt/pmem", "numa:one", "cxl:0", "pmem:relative", 3])
def test_what_names_no_slow_memory_is_refused(text: object) -> None:
    with pytest.raises(BadArgument, match=r"pmem:///path"):
        open_slow(text)  # type: ignore[arg-type]


def test_a_command_refuses_it_before_anything_is_opened() -> None:
    check_slow("pmem:///mnt/pmem?emulate=optane")
    with pytest.raises(BadArgument, match="cannot read"):
        check_slow("/mnt/pmem")
