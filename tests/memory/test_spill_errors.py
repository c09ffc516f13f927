"""A failed write keeps the value, a failed read raises, and nothing is ever silently wrong (R4)."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.memory.native.bindings import CORRUPTED, SHORT_READ, Place
from tests.memory.engine import MIB, PATIENCE_S, Engine, HeldMedium, files, filled, pattern, peek

Opened = Callable[..., Engine]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("verify", [False, True])
def test_a_failed_write_keeps_the_value_and_is_told_once(opened: Opened, code: int, verify: bool) -> None:
    medium = HeldMedium()
    engine = opened(medium, verify=verify)
    x = filled(20 * MIB)
    medium.write_errno = code
    assert engine.start_leaving(x)
    engine.native.settle()
    assert engine.place(x) is Place.HERE
    error, warning = engine.memory.take_errors()
    assert error is None
    assert os.strerror(code) in warning
    assert "20.0 MiB" in warning
    assert "'held'" in warning
    assert engine.memory.take_errors() == (None, "")
    assert not engine.start_leaving(x)  # it stays
    assert engine.tier_used() == 0
    assert torch.equal(x, pattern(20 * MIB))


def test_a_failed_write_refuses_what_needs_its_room(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium, budget=4 * MIB)
    x, y = filled(MIB, 1), filled(MIB, 2)
    medium.write_errno = errno.ENOSPC
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * MIB, dtype=torch.uint8)
    assert torch.equal(x, pattern(MIB, 1))
    assert torch.equal(y, pattern(MIB, 2))
    assert engine.peak <= 4 * MIB


def test_a_full_tier_takes_again_once_there_is_room(opened: Opened, tmp_path: Path) -> None:
    engine = opened(files(tmp_path, capacity_bytes=2 * MIB))
    x, y, z = filled(MIB, 1), filled(MIB, 2), filled(MIB, 3)
    engine.send_away(x, y)
    assert not engine.start_leaving(z)
    assert os.strerror(errno.ENOSPC) in engine.memory.take_errors()[1]
    assert engine.tier_used() == 2 * MIB
    del x
    engine.send_away(z)
    assert torch.equal(y, pattern(MIB, 2))
    assert torch.equal(z, pattern(MIB, 3))


def _fail(medium: HeldMedium, x: torch.Tensor, way: str) -> int:
    if way == "error":
        medium.read_errno = errno.EIO
        return errno.EIO
    offset, _ = medium.writes[0]
    medium.store[offset + 12345] ^= 1
    return CORRUPTED


@pytest.mark.parametrize("way", ["error", "corrupted"])
@pytest.mark.parametrize("use", ["operator", "fault"])
def test_a_failed_read_raises(opened: Opened, way: str, use: str) -> None:
    medium = HeldMedium()
    engine = opened(medium, verify=True)
    x = filled(MIB)
    engine.send_away(x)
    code = _fail(medium, x, way)
    with pytest.raises(torch.OutOfMemoryError, match="could not be read back"):
        if use == "operator":
            x.add_(1)
        else:
            peek(x)
        filled(MIB)
    error, _ = engine.memory.take_errors()
    assert isinstance(error, lowtide.SpillCorrupted if code == CORRUPTED else lowtide.SpillError)
    filled(MIB)  # told once


@pytest.mark.parametrize("use", ["operator", "fault"])
def test_what_could_not_be_read_is_read_again_once_that_was_told(opened: Opened, use: str) -> None:
    medium = HeldMedium()
    engine = opened(medium, budget=4 * MIB)
    x = filled(MIB)
    engine.send_away(x)
    medium.read_errno = errno.EIO
    if use == "operator":
        with pytest.raises(torch.OutOfMemoryError, match="could not be read back"):
            x.add(1)
    else:
        assert peek(x) == 0xFF  # what a float would call NaN
        assert not engine.start_leaving(x)  # that is nobody's value
        assert engine.place(x) is Place.HERE
    assert isinstance(engine.memory.take_errors()[0], lowtide.SpillError)
    assert engine.place(x) is Place.AWAY
    medium.read_errno = 0
    assert torch.equal(x, pattern(MIB))
    assert engine.memory.take_errors() == (None, "")
    assert engine.peak <= 4 * MIB


def test_a_read_ahead_that_failed_is_nobodys_concern_until_its_bytes_are_used(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    x, small = filled(MIB), torch.zeros(1)
    engine.send_away(x)
    medium.read_errno = errno.EIO
    native = engine.native
    native.step_begin(
        native.plan_add(
            names=[native.name_id("aten::fill_")],
            storages=[(engine.memory.serial_of(x), -1, -1, MIB, engine.memory.first_tier, 0)],
            uses=[(0,)],
            actions=[(0, 1, 0, engine.memory.first_tier, -1, 0)],
        )
    )
    small.fill_(1)  # x comes back ahead of its use, and fails
    native.step_end()
    native.settle()
    assert engine.memory.take_errors()[0] is None
    peek(x)
    assert isinstance(engine.memory.take_errors()[0], lowtide.SpillError)
    medium.read_errno = 0
    assert torch.equal(x, pattern(MIB))


def test_what_was_lost_can_be_written_anew(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    x = filled(MIB, 1)
    engine.send_away(x)
    medium.read_errno = errno.EIO
    peek(x)
    assert engine.memory.take_errors()[0] is not None
    medium.read_errno = 0
    x.copy_(pattern(MIB, 2))
    for _ in range(2):
        engine.send_away(x)
        assert torch.equal(x, pattern(MIB, 2))
    assert engine.memory.take_errors() == (None, "")


def test_what_is_lost_passes_no_budget(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium, budget=4 * MIB)
    x = filled(2 * MIB)
    engine.send_away(x)
    medium.read_errno = errno.EIO
    peek(x)
    assert engine.peak <= 4 * MIB
    engine.memory.take_errors()


def test_a_file_that_was_cut(opened: Opened, tmp_path: Path) -> None:
    medium = files(tmp_path)
    engine = opened(medium)
    x = filled(MIB)
    engine.send_away(x)
    os.ftruncate(medium.fds[0], MIB // 2)
    peek(x)
    trouble, _ = engine.native.take_trouble()
    assert trouble is not None
    assert trouble.code == SHORT_READ


def test_a_file_that_was_changed(opened: Opened, tmp_path: Path) -> None:
    medium = files(tmp_path)
    engine = opened(medium, verify=True)
    x = filled(MIB)
    engine.send_away(x)
    medium.write_at(4096 * 20, memoryview(b"?" * 4096))
    peek(x)
    assert isinstance(engine.memory.take_errors()[0], lowtide.SpillCorrupted)


def test_closing_raises_what_cannot_be_read(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    x = filled(MIB)
    engine.send_away(x)
    medium.read_errno = errno.EIO
    engine.open = False
    with pytest.raises(lowtide.SpillError):
        engine.memory.close()
    assert peek(x) == 0xFF  # served, and not what it was: closing said so


def test_nothing_leaves_while_the_end_waits(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    x, y = filled(MIB, 1), filled(MIB, 2)
    engine.send_away(x)
    medium.may_read.clear()
    closing = threading.Thread(target=engine.memory.close)
    closing.start()
    assert medium.reading.acquire(timeout=PATIENCE_S)
    assert not engine.start_leaving(y)
    medium.may_read.set()
    closing.join(PATIENCE_S)
    engine.open = False
    assert torch.equal(x, pattern(MIB, 1))
    assert torch.equal(y, pattern(MIB, 2))


def test_what_is_lost_is_said_once_and_does_not_trouble_the_next_tide(tmp_path: Path) -> None:
    medium = HeldMedium()
    engine = Engine(medium)
    lost = filled(MIB)
    engine.send_away(lost)
    medium.read_errno = errno.EIO
    with pytest.raises(lowtide.SpillError):
        engine.memory.close()
    again = Engine(files(tmp_path))
    x = filled(MIB, 2)
    again.send_away(x)
    again.memory.close()
    assert torch.equal(x, pattern(MIB, 2))
    assert bool(lost.view(torch.float32).isnan().all())
