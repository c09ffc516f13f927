from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lowtide.errors import BadArgument
from lowtide.tiers import FileMedium, NullMedium, PlainMedium, known_schemes, open_medium
from lowtide.tiers import open as open_module


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution that brings three schemes: one works, one cannot be imported, one makes no medium."""
    (tmp_path / "seaside.py").write_text(
        "from lowtide.tiers import NullMedium\n"
        "opened = []\n"
        "def make(url, *, capacity_bytes):\n"
        "    opened.append(url)\n"
        "    return NullMedium(capacity_bytes=capacity_bytes)\n"
        "def make_nothing(url, *, capacity_bytes):\n"
        "    return object()\n"
    )
    info = tmp_path / "seaside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seaside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lowtide.tiers]\nbeach = seaside:make\nfog = seaside_missing:make\nmirage = seaside:make_nothing\n"
        "file = seaside:make\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "seaside", raising=False)


def opened_directories(spill: object) -> tuple[Path, ...]:
    medium = open_medium(spill)  # type: ignore[arg-type]
    assert isinstance(medium, FileMedium)
    medium.close()
    return medium.directories


def test_a_directory_as_text_path_and_url(tmp_path: Path) -> None:
    spaced = tmp_path / "a b"
    spaced.mkdir()
    url = f"file://{tmp_path}/a%20b"
    for spill in (str(spaced), spaced, url, url.replace("file://", "file://localhost"), url.replace("file", "FILE", 1)):
        assert opened_directories(spill) == (spaced,)


def test_a_list_is_striped(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert opened_directories([tmp_path, f"file://{tmp_path}/b"]) == (tmp_path, tmp_path / "b")


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert opened_directories("~") == (tmp_path,)


def test_a_path_may_hold_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run:1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert opened_directories("./run:1") == (tmp_path / "run:1",)
    assert opened_directories(Path("run:1")) == (tmp_path / "run:1",)


def test_capacity_is_passed_on(tmp_path: Path) -> None:
    for spill in (tmp_path, [tmp_path], "null:"):
        medium = open_medium(spill, capacity_bytes=5000)
        assert medium.capacity_bytes == 5000
        medium.close()


def test_null() -> None:
    for spill in ("null:", "null://"):
        assert isinstance(open_medium(spill), NullMedium)
    with pytest.raises(BadArgument, match="write 'null:'"):
        open_medium("null:/somewhere")


def test_a_medium_is_returned_as_it_is() -> None:
    medium = NullMedium(capacity_bytes=5000)
    assert open_medium(medium) is medium
    assert open_medium(medium, capacity_bytes=5000) is medium
    with pytest.raises(BadArgument, match="capacity of 5000 bytes, not 6000"):
        open_medium(medium, capacity_bytes=6000)


def test_a_medium_that_says_too_little_of_itself_is_refused_with_what_it_lacks() -> None:
    class Old:
        name, capacity_bytes, lossy = "old", None, False

        def write_at(self, offset: int, data: memoryview) -> None: ...

        def read_at(self, offset: int, into: memoryview) -> None: ...

        def close(self) -> None: ...

    class New(Old, PlainMedium):
        pass

    with pytest.raises(
        BadArgument, match="Old is not a Medium: it lacks codecs, directories, engine, figures, files, re"
    ):
        open_medium(Old())  # type: ignore[arg-type]
    new = New()
    assert open_medium(new) is new


@pytest.mark.parametrize(
    ("spill", "text"),
    [
        ("s3://bucket", "unknown tier 's3' in 's3://bucket': known are dram, file, null, redis, rediss"),
        ("file://other/host", "file:///path"),
        ("file:relative", "file:///path"),
        ("file:///tmp?direct=no", "file:///path"),
        ("", "empty"),
        (["null:"], "list holds directories"),
        ([3], "list holds directories"),
        ([], "at least one"),
        (3, "pass a directory"),
        (b"/tmp", "pass a directory"),
    ],
)
def test_what_cannot_be_opened_is_told_in_a_line(spill: object, text: str) -> None:
    with pytest.raises(BadArgument, match=text) as bad:
        open_medium(spill)  # type: ignore[arg-type]
    assert "\n" not in str(bad.value)


@pytest.mark.parametrize("spill", [None, "/tmp", "null:"])
def test_an_impossible_capacity_is_refused(spill: str | None) -> None:
    with pytest.raises(BadArgument, match="capacity"):
        open_medium(spill, capacity_bytes=0)


def test_the_environment_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_SPILL", str(tmp_path))
    assert opened_directories(None) == (tmp_path,)
    monkeypatch.setenv("LOWTIDE_SPILL", "null:")
    assert isinstance(open_medium(None), NullMedium)


@pytest.mark.parametrize("unset", [True, False])
def test_the_temporary_directory_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unset: bool) -> None:
    monkeypatch.delenv("LOWTIDE_SPILL", raising=False)
    if not unset:
        monkeypatch.setenv("LOWTIDE_SPILL", "")
    monkeypatch.setattr(open_module.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(open_module.filesystem, "is_memory", lambda path: False)
    assert opened_directories(None) == (tmp_path,)


def test_a_default_in_memory_gives_way_to_a_disk_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_SPILL", raising=False)
    monkeypatch.setattr(open_module.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(open_module.filesystem, "is_memory", lambda path: path == tmp_path)
    medium = open_medium(None)
    assert isinstance(medium, FileMedium)
    assert medium.directories == (Path("/var/tmp"),)
    assert medium.notes == (f"spilling to /var/tmp, because {tmp_path} is on a filesystem in memory",)
    medium.close()
    monkeypatch.setattr(open_module.filesystem, "is_memory", lambda path: True)
    medium = open_medium(None)
    assert isinstance(medium, FileMedium)
    assert medium.directories == (tmp_path,)
    assert any("frees no memory" in note for note in medium.notes)
    medium.close()


@pytest.mark.usefixtures("plugin")
def test_installed_schemes_are_known_loaded_late_and_never_shadow(tmp_path: Path) -> None:
    assert known_schemes() == ("beach", "dram", "file", "fog", "mirage", "null", "redis", "rediss")
    assert opened_directories(f"file://{tmp_path}") == (tmp_path,)
    assert "seaside" not in sys.modules
    medium = open_medium("beach://sand?x=1", capacity_bytes=7)
    assert medium.capacity_bytes == 7
    assert sys.modules["seaside"].opened == ["beach://sand?x=1"]


@pytest.mark.usefixtures("plugin")
def test_schemes_that_do_not_work_are_told_with_their_package() -> None:
    with pytest.raises(BadArgument, match="tier 'fog' of seaside cannot be loaded: No module named 'seaside_missing'"):
        open_medium("fog:")
    with pytest.raises(BadArgument, match="tier 'mirage' of seaside made a object, which is not a Medium"):
        open_medium("mirage:")
    with pytest.raises(BadArgument, match="known are beach, dram, file, fog, mirage, null, redis, rediss"):
        open_medium("rain:")
