"""A file that weights are in is saved over: the model keeps its weights, and the file has them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lowtide
from lowtide.errors import CheckpointCorrupted
from lowtide.memory import ranges
from lowtide.memory.streamed_files import StreamedFiles
from tests.execute.training import away_bytes

MIB = 2**20
WIDTH, DEPTH = 512, 12  # a MiB a layer

Save = Callable[[Any, Path], None]


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    yield
    if ranges._lingering is not None:
        lowtide.fit(budget="1GiB", policy="lru").close()
    assert away_bytes() == 0


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def call(model: nn.Module) -> Tensor:
    with torch.no_grad():
        answer: Tensor = model(torch.ones(1, WIDTH))
    return answer


@pytest.mark.parametrize("save", [save_file, torch.save])
@pytest.mark.parametrize("budget", [200 * MIB, 4 * MIB], ids=["fits", "larger"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_file_that_is_saved_over_keeps_the_weights_that_are_in_it(
    save: Save, budget: int, linked: bool, tmp_path: Path
) -> None:
    stock = build()
    expected = call(stock)
    path, elsewhere = tmp_path / "weights", tmp_path / "elsewhere"
    save(stock.state_dict(), path)
    if linked:
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    content = path.read_bytes()
    del stock
    with lowtide.init(budget=budget, spill=tmp_path):
        model = lowtide.load(build, path)
    with lowtide.serve(model, budget=budget, spill=tmp_path):
        save(model.state_dict(), path)
        assert path.is_symlink() == (linked and save is torch.save)  # safetensors renames
        assert path.read_bytes() == content
        for _ in range(3):
            assert torch.equal(call(model), expected)


def test_an_ordinary_file_is_cut_as_ever(tmp_path: Path) -> None:
    path, other = tmp_path / "weights", tmp_path / "other"
    save_file(build().state_dict(), path)
    other.write_bytes(b"something else")
    number = other.stat().st_ino
    with lowtide.init(budget=4 * MIB, spill=tmp_path):
        model = lowtide.load(build, path)
    with lowtide.serve(model, budget=4 * MIB, spill=tmp_path):
        torch.save(model.state_dict(), other)
    assert other.stat().st_ino == number
    assert torch.equal(torch.load(other)["0.bias"], build().state_dict()["0.bias"])


def test_a_model_in_its_file_stays_clean_when_it_is_saved(tmp_path: Path) -> None:
    save_file(build().state_dict(), tmp_path / "weights")
    with lowtide.init(budget=4 * MIB, spill=tmp_path):
        model = lowtide.load(build, tmp_path / "weights")
    with lowtide.serve(model, budget=4 * MIB, spill=tmp_path) as tide:
        torch.save(model.state_dict(), tmp_path / "one")
        save_file(model.state_dict(), tmp_path / "two")
        call(model)
        assert tide.stats()["swapped_out_bytes"] == 0


@pytest.mark.parametrize("save", [save_file, torch.save])
def test_weights_that_cannot_be_read_are_not_saved_as_something_else(save: Save, tmp_path: Path) -> None:
    path, saved = tmp_path / "weights", tmp_path / "saved"
    save_file(build().state_dict(), path)
    with pytest.raises(CheckpointCorrupted, match="was cut"):
        with lowtide.init(budget=4 * MIB, spill=tmp_path):
            model = lowtide.load(build, path)
            os.truncate(path, 6 * MIB)
            try:
                save(model.state_dict(), saved)
            finally:
                del model
    # safetensors' file appears when it is whole; of PyTorch's nothing can be loaded.
    assert saved.exists() == (save is torch.save)
    with pytest.raises((RuntimeError, FileNotFoundError)):
        torch.load(saved)


def test_a_save_that_fails_keeps_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"from before")
    path.chmod(0o600)
    with lowtide.init(budget=4 * MIB, spill=tmp_path):
        model = build()
    with lowtide.serve(model, budget=4 * MIB, spill=tmp_path):

        def full(*_args: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(StreamedFiles, "_write", full)
            with pytest.raises(OSError, match="No space left"):
                save_file(model.state_dict(), path)
        assert path.read_bytes() == b"from before"
        assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["weights"]
        save_file(model.state_dict(), path)
        save_file({"x": torch.ones(1)}, tmp_path / "small")
    assert path.stat().st_mode == (tmp_path / "small").stat().st_mode
    assert torch.equal(load_file(path)["3.weight"], build().state_dict()["3.weight"])
