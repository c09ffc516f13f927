from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.errors import BadArgument, SpillError, SpillFull
from lowtide.testing.stores import page_aligned, some_bytes
from lowtide.tiers import FileMedium
from lowtide.tiers import file as file_module
from lowtide.tiers.filesystem import filesystem_type

MIB = 2**20
WITHOUT_TMPFILE = "import lowtide.tiers.file as f; f._O_TMPFILE = 'O_NO_SUCH_FLAG'"


@pytest.fixture(params=["tmpfile", "unlinked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to a file without a name."""
    if request.param == "unlinked":
        monkeypatch.setattr(file_module, "_O_TMPFILE", "O_NO_SUCH_FLAG")
    return str(request.param)


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[FileMedium]:
    medium = FileMedium([tmp_path])
    yield medium
    medium.close()


def test_the_file_is_private_and_not_to_be_seen(tmp_path: Path, way: str) -> None:
    old = os.umask(0o777)
    try:
        medium = FileMedium([tmp_path])
    finally:
        os.umask(old)
    medium.write_at(0, memoryview(b"secret"))
    assert list(tmp_path.iterdir()) == []
    for fd in medium.fds:
        status = os.fstat(fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
        assert not os.get_inheritable(fd)
    medium.close()
    assert medium.fds == ()


def test_opening_leaves_the_file_empty(medium: FileMedium) -> None:
    assert [os.fstat(fd).st_size for fd in medium.fds] == [0]


@pytest.mark.parametrize("prelude", ["", WITHOUT_TMPFILE], ids=["tmpfile", "unlinked"])
def test_nothing_is_left_after_kill_9(tmp_path: Path, prelude: str) -> None:
    program = f"""
import sys, time
from pathlib import Path
{prelude}
from lowtide.tiers import FileMedium
medium = FileMedium([Path(sys.argv[1])])
medium.write_at(0, memoryview(bytes(4 * 2**20)))
print("written", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        assert list(tmp_path.iterdir()) == []
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


NAMED = """
import os, sys
from pathlib import Path
{prelude}
from lowtide.tiers import FileMedium
unlink = Path.unlink
def refuse(self, missing_ok=False): raise PermissionError("in use")
Path.unlink = refuse
medium = FileMedium([Path(sys.argv[1])])
Path.unlink = unlink
assert len(list(Path(sys.argv[1]).iterdir())) == 1
"""


@pytest.mark.parametrize("ending", ["medium.close()", "del medium", "pass", "raise SystemExit(0)"])
def test_where_an_open_file_keeps_its_name_it_is_removed_in_the_end(tmp_path: Path, ending: str) -> None:
    program = NAMED.format(prelude=WITHOUT_TMPFILE) + ending
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_disturb_its_parent(tmp_path: Path) -> None:
    program = (
        NAMED.format(prelude=WITHOUT_TMPFILE)
        + """
from lowtide.errors import SpillError
medium.write_at(0, memoryview(b"parent"))
pid = os.fork()
if pid == 0:
    inherited = bytearray(6)
    medium.read_at(0, memoryview(inherited))
    assert inherited == b"parent", inherited
    try:
        medium.write_at(0, memoryview(b"child!"))
    except SpillError as error:
        assert "belongs to process" in str(error)
        medium.close()
        sys.exit(7)  # runs the exit handlers of the child
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert len(list(Path(sys.argv[1]).iterdir())) == 1, "the child removed the parent's file"
back = bytearray(6)
medium.read_at(0, memoryview(back))
assert back == b"parent", back
"""
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_stripes_lie_where_the_documentation_says(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "abc"]
    for directory in directories:
        directory.mkdir()
    medium = FileMedium(directories)
    start = 3 * MIB
    content = some_bytes(45 * MIB)
    medium.write_at(start, page_aligned(content))
    assert medium.stripe_bytes == 8 * MIB
    draw = random.Random(1)
    for _ in range(50):
        inside = draw.randrange(0, len(content), 4096)
        stripe, rest = divmod(start + inside, medium.stripe_bytes)
        block = mmap.mmap(-1, 4096)
        os.preadv(medium.fds[stripe % 3], [block], stripe // 3 * medium.stripe_bytes + rest)
        assert block[:] == content[inside : inside + 4096]
    medium.close()


def test_descriptors_take_aligned_direct_requests(medium: FileMedium) -> None:
    """What the native engine relies on: if `direct`, O_DIRECT is really set."""
    import fcntl

    flags = fcntl.fcntl(medium.fds[0], fcntl.F_GETFL)
    assert bool(flags & os.O_DIRECT) == medium.direct


def test_one_buffered_directory_makes_all_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(file_module.filesystem, "is_memory", lambda path: path.name == "memory")
    medium = FileMedium([tmp_path, tmp_path / "memory"])
    assert not medium.direct
    medium.write_at(0, memoryview(b"odd"))
    assert os.fstat(medium.fds[0]).st_size == 3
    medium.close()


def test_partial_transfers_are_continued(medium: FileMedium, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def dribble_out(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append("write")
        return os.pwrite(fd, buffers[0][:8192], offset)

    def dribble_in(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append("read")
        return preadv(fd, [buffers[0][:8192]], offset)

    preadv = os.preadv
    monkeypatch.setattr(os, "pwritev", dribble_out)
    monkeypatch.setattr(os, "preadv", dribble_in)
    content = some_bytes(5 * 8192)
    medium.write_at(0, page_aligned(content))
    into = page_aligned(bytes(len(content)))
    medium.read_at(0, into)
    assert bytes(into) == content
    assert calls == ["write"] * 5 + ["read"] * 5


def test_a_disk_that_takes_nothing_is_an_error_not_a_loop(medium: FileMedium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    with pytest.raises(SpillError, match="took 0 of 4096 bytes"):
        medium.write_at(0, page_aligned(bytes(4096)))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_errors_name_the_place_the_bytes_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, medium: FileMedium
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refuse)
    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(SpillError) as write:
        medium.write_at(0, memoryview(bytes(5000)))
    with pytest.raises(SpillError) as read:
        medium.read_at(0, memoryview(bytearray(5000)))
    for caught in (write, read):
        assert caught.value.errno == number
        for part in (str(tmp_path), "5000 bytes", os.strerror(number)):
            assert part in str(caught.value)
        assert "\n" not in str(caught.value)
    assert isinstance(write.value, SpillFull) == (number != errno.EIO)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """On a real filesystem of 1 MiB where root may mount one; test_wrappers.py plays it everywhere."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small filesystem here: {mounted.stderr.decode().strip()}")
    try:
        medium = FileMedium([tmp_path], capacity_bytes=64 * MIB)
        assert any("1.00 MiB free" in note for note in medium.notes)
        content = some_bytes(512 * 1024)
        medium.write_at(0, memoryview(content))
        with pytest.raises(SpillFull, match="No space left on device") as full:
            medium.write_at(MIB, memoryview(bytes(2 * MIB)))
        assert str(tmp_path) in str(full.value)
        assert f"{2 * MIB} bytes" in str(full.value)
        into = bytearray(len(content))
        medium.read_at(0, memoryview(into))
        assert into == content
        medium.close()
    finally:
        # Lazily, because a failure above leaves the file open.
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_limit_on_file_sizes_counts_as_full(tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from lowtide.errors import SpillFull
from lowtide.tiers import FileMedium
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
medium = FileMedium([Path(sys.argv[1])])
try:
    medium.write_at(0, memoryview(bytes(2 << 20)))
except SpillFull as error:
    assert "too large" in str(error), error
    sys.exit(7)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == 7


def test_a_file_cut_off_from_outside_is_a_short_read(medium: FileMedium) -> None:
    medium.write_at(0, memoryview(some_bytes(5 * MIB)))
    os.ftruncate(medium.fds[0], 3 * MIB)
    with pytest.raises(SpillError, match=f"short read: .* gave {3 * MIB} of {5 * MIB} bytes"):
        medium.read_at(0, memoryview(bytearray(5 * MIB)))


def test_capacity_bounds_the_file(tmp_path: Path) -> None:
    medium = FileMedium([tmp_path], capacity_bytes=MIB)
    medium.write_at(MIB - 4096, memoryview(bytes(4096)))
    with pytest.raises(SpillFull, match=r"1\.00 MiB"):
        medium.write_at(MIB - 4096, memoryview(bytes(4097)))
    medium.close()


def test_odd_offsets_are_refused_before_anything_is_written(medium: FileMedium) -> None:
    for offset in (-4096, 1, 512):
        with pytest.raises(BadArgument, match="multiple of 4096"):
            medium.write_at(offset, memoryview(b"x"))
    assert os.fstat(medium.fds[0]).st_size == 0


def test_directories_that_cannot_be_used_are_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cases = {
        tmp_path / "missing": "does not exist: create it",
        tmp_path / "file": "is not a directory",
        Path("/proc"): "cannot create a file in spill directory /proc",
    }
    for directory, text in cases.items():
        with pytest.raises(BadArgument, match=text) as bad:
            FileMedium([tmp_path, directory])
        assert str(directory) in str(bad.value)
        assert "another one" in str(bad.value)
        assert "\n" not in str(bad.value)
    assert not (tmp_path / "missing").exists()


def test_a_failed_opening_leaks_no_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(BadArgument):
            FileMedium([tmp_path, tmp_path / "missing"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("capacity_bytes", [0, -1])
def test_a_capacity_that_holds_nothing_is_refused(tmp_path: Path, capacity_bytes: int) -> None:
    with pytest.raises(BadArgument, match="capacity"):
        FileMedium([tmp_path], capacity_bytes=capacity_bytes)


def test_no_directory_is_refused() -> None:
    with pytest.raises(BadArgument, match="no spill directory"):
        FileMedium([])


def test_filesystems_are_told_by_the_deepest_and_latest_mount() -> None:
    mountinfo = (
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:5 / /mnt rw shared:1 - tmpfs tmpfs rw\n"
        "3 2 8:2 / /mnt/a\\040b rw - xfs /dev/b rw\n"
        "4 1 8:3 / /twice rw - tmpfs tmpfs rw\n"
        "5 4 8:4 / /twice rw - btrfs /dev/c rw\n"
    )
    kinds = {"/x": "ext4", "/mnt/y": "tmpfs", "/mnt/a b/c": "xfs", "/mntx": "ext4", "/twice/z": "btrfs"}
    assert {path: filesystem_type(Path(path), mountinfo=mountinfo) for path in kinds} == kinds
