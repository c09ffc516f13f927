"""Every medium keeps the contract that third parties are held to."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.testing.stores import MediumTests
from lowtide.tiers import Faulty, FileMedium, Latency, Medium, NullMedium, Throttle, open_medium
from lowtide.tiers import file as file_module


def two_directories(tmp_path: Path) -> list[Path]:
    for name in ("first", "second"):
        (tmp_path / name).mkdir(exist_ok=True)
    return [tmp_path / "first", tmp_path / "second"]


class TestOneDirectory(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return FileMedium([tmp_path])


class TestBuffered(MediumTests):
    """As on a filesystem that refuses O_DIRECT."""

    @pytest.fixture(autouse=True)
    def _no_direct(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(file_module, "_O_DIRECT", "O_NO_SUCH_FLAG")

    def make_medium(self, tmp_path: Path) -> Medium:
        medium = FileMedium([tmp_path])
        assert not medium.direct
        return medium


class TestStriped(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return FileMedium(two_directories(tmp_path))


class TestStripedBuffered(TestBuffered):
    def make_medium(self, tmp_path: Path) -> Medium:
        medium = FileMedium(two_directories(tmp_path))
        assert not medium.direct
        return medium


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs to try")
class TestTmpfs(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        medium = FileMedium([Path("/dev/shm")])
        assert not medium.direct
        assert any("in memory" in note for note in medium.notes)
        return medium


class TestNull(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return NullMedium()


class TestLatency(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return Latency(FileMedium([tmp_path]), write_s=1e-5, read_s=1e-5)


class TestThrottle(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return Throttle(FileMedium([tmp_path]), write_bytes_per_s=1e10, read_bytes_per_s=1e10)


class TestFaultless(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return Faulty(FileMedium([tmp_path]), script=[])


class TestFileUrl(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return open_medium(f"file://{tmp_path}", capacity_bytes=64 * 2**20)


class TestEncoded(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return open_medium(f"file+zvc://{tmp_path}", capacity_bytes=64 * 2**20)


class TestDram(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return open_medium("dram:64MiB")


class TestEncodedDram(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return open_medium("dram+zvc:64MiB")
