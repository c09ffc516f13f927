"""Memory that somebody has the address of: the kernel does not fault, so it stays while it is lent."""

from __future__ import annotations

import ctypes
import gc
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.memory.native.bindings import Place
from tests.memory.engine import MIB, Engine, HeldMedium, address_of, filled, pattern

Opened = Callable[..., Engine]


def test_an_array_pins_as_long_as_it_lives(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)
    array = x.numpy()
    assert engine.place(x) is Place.HERE
    assert not engine.start_leaving(x)
    view = array[5:]
    del array
    assert not engine.start_leaving(x)
    del view
    engine.send_away(x)
    second = np.asarray(x)
    assert not engine.start_leaving(x)
    del second
    engine.send_away(x)


def test_an_array_that_cannot_be_made_pins_nothing(opened: Opened) -> None:
    engine = opened()
    x = torch.zeros(MIB, requires_grad=True)
    with pytest.raises(RuntimeError):
        x.numpy()
    engine.send_away(x)


def test_memory_lent_for_good_stays(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)
    other = torch.from_dlpack(x)
    assert not engine.start_leaving(x)
    other.add_(1)
    assert torch.equal(x, pattern(MIB) + 1)


def test_bare_addresses_are_bounded(opened: Opened) -> None:
    budget = 32 * MIB
    engine = opened(budget=budget)
    xs = [filled(MIB, seed) for seed in range(12)]
    for x in xs:
        x.data_ptr()
        x.untyped_storage().data_ptr()
    pinned = [x for x in xs if not engine.start_leaving(x)]
    assert pinned == [] or sum(x.nbytes for x in pinned) <= budget // 8
    assert any(x is xs[-1] for x in pinned)  # the last is in use, as likely as not


def test_small_views_count_as_what_they_pin(opened: Opened) -> None:
    budget = 32 * MIB
    engine = opened(budget=budget)
    xs = [filled(MIB, seed) for seed in range(12)]
    for x in xs:
        x[:1].data_ptr()
    pinned = [x for x in xs if not engine.start_leaving(x)]
    assert 0 < len(pinned) * MIB <= budget // 8


def test_whoever_has_the_address_may_write(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)
    address = x.data_ptr()
    ctypes.memset(address + 5, 9, 1)
    for _ in range(8):
        filled(9 * MIB).data_ptr()  # others: x is not pinned any more
    engine.send_away(x)
    want = pattern(MIB)
    want[5] = 9
    assert torch.equal(x, want)


def test_system_calls_read_and_write_tensors(opened: Opened, tmp_path: Path) -> None:
    engine = opened()
    x, want = filled(MIB), pattern(MIB).numpy().tobytes()
    path = tmp_path / "bytes"
    engine.send_away(x)
    with path.open("wb", buffering=0) as file:
        assert os.write(file.fileno(), x.numpy()) == MIB
    assert path.read_bytes() == want
    engine.send_away(x)
    x.numpy().tofile(path)
    assert path.read_bytes() == want
    engine.send_away(x)
    path.write_bytes(want[::-1])
    with path.open("rb", buffering=0) as file:
        assert file.readinto(x.numpy()) == MIB
    engine.send_away(x)
    assert x.numpy().tobytes() == want[::-1]
    engine.send_away(x)
    with pytest.raises(OSError, match="Bad address"), path.open("wb", buffering=0) as file:
        os.write(file.fileno(), (ctypes.c_char * MIB).from_address(address_of(x)))  # what all of this is for


def test_a_system_call_writes_what_came_back_unchanged(opened: Opened, tmp_path: Path) -> None:
    x = filled(MIB, 1)  # from before: mapped for reading only when it comes back
    engine = opened()
    engine.send_away(x)
    assert torch.equal(x, pattern(MIB, 1))
    path = tmp_path / "bytes"
    path.write_bytes(pattern(MIB, 2).numpy().tobytes())
    with path.open("rb", buffering=0) as file:
        assert file.readinto(x.numpy()) == MIB
    engine.send_away(x)
    assert torch.equal(x, pattern(MIB, 2))
    engine.close(left=1)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("target", ["path", "file", "buffer"])
def test_checkpoints_of_what_is_away(opened: Opened, tmp_path: Path, zipped: bool, target: str) -> None:
    engine = opened(budget=16 * MIB)
    model = {str(seed): filled(2 * MIB, seed) for seed in range(14)}
    path = tmp_path / "checkpoint"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # nobody reads the bytes before the kernel does
    try:
        engine.native.leave_all()
        engine.native.settle()
        if target == "path":
            torch.save(model, path, _use_new_zipfile_serialization=zipped)
        elif target == "file":
            with path.open("wb") as file:
                torch.save(model, file, _use_new_zipfile_serialization=zipped)
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer, _use_new_zipfile_serialization=zipped)
            path.write_bytes(buffer.getvalue())
    finally:
        torch.serialization.set_crc32_options(before)
    del model
    loaded = torch.load(path, weights_only=False)
    for name, each in loaded.items():
        assert torch.equal(each, pattern(2 * MIB, int(name)))
    assert engine.peak <= 16 * MIB
    assert engine.counted.beyond == 0


def test_a_storage_is_filled_from_a_file(opened: Opened, tmp_path: Path) -> None:
    engine = opened()
    x = filled(MIB, 1)
    path = tmp_path / "bytes"
    path.write_bytes(MIB.to_bytes(8, "little") + pattern(MIB, 2).numpy().tobytes())
    engine.send_away(x)
    with path.open("rb") as file:
        x.untyped_storage()._set_from_file(file, 0, True, 1)
    engine.send_away(x)
    assert torch.equal(x, pattern(MIB, 2))


def test_safetensors_of_what_is_away(opened: Opened, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    engine = opened()
    model = {str(seed): filled(MIB, seed) for seed in range(3)}
    engine.send_away(*model.values())
    safetensors.save_file(model, tmp_path / "model.safetensors")
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], pattern(MIB, int(name))) for name in model)
    del loaded


def test_everything_is_as_it_was_afterwards(opened: Opened) -> None:
    ways = [(torch.Tensor, name) for name in ("numpy", "__dlpack__", "data_ptr")]
    ways += [(torch.UntypedStorage, name) for name in ("data_ptr", "_write_file", "_set_from_file")]
    ways += [(torch._C.PyTorchFileWriter, "write_record")]
    before = [getattr(owner, name) for owner, name in ways]
    own = [name in vars(owner) for owner, name in ways]
    engine = opened()
    assert all(getattr(owner, name) is not old for (owner, name), old in zip(ways, before, strict=True))
    x = filled(MIB)
    array = x.numpy()
    engine.close(left=1)
    assert [getattr(owner, name) for owner, name in ways] == before
    assert [name in vars(owner) for owner, name in ways] == own
    assert np.array_equal(array, pattern(MIB).numpy())


def test_what_cannot_be_read_is_not_lent_silently(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    x = filled(MIB)
    engine.send_away(x)
    medium.read_errno = 5
    array = x.numpy()
    error, _ = engine.memory.take_errors()
    assert error is not None
    assert array[0] == 0xFF  # nothing that looks like a value
    assert engine.memory.take_errors()[0] is not None  # used: told again
    del array
    gc.collect()
    medium.read_errno = 0
    x.fill_(3)
    engine.send_away(x)
    assert int(x[7]) == 3


def test_other_kinds_of_tensors_are_left_alone(opened: Opened) -> None:
    opened()
    assert torch.empty(3, device="meta").data_ptr() == 0
    assert torch.empty(0).data_ptr() == 0
    sparse = torch.zeros(100, 100).to_sparse()
    with pytest.raises(RuntimeError):
        sparse.data_ptr()
