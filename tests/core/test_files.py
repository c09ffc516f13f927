"""Files are written whole, where they are, and as readable as any other."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from lowtide.core.files import write_whole


def test_a_link_stays_one_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_pipe_is_written_into_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"through")
    reader.join(timeout=10)
    assert read == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def test_a_new_file_has_the_permissions_of_any_other_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    path, other = tmp_path / "result", tmp_path / "other"
    other.write_bytes(b"")
    write_whole(path, b"1")
    assert path.stat().st_mode == other.stat().st_mode
    path.chmod(0o640)
    write_whole(path, b"2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result"
    path.write_bytes(b"old")

    def fail(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result"]
