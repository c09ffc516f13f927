"""Checkpoints that are unusual, and ones that lie: the first come back to the bit, the others are refused unchanged."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lowtide
from lowtide.errors import CheckpointCorrupted, CheckpointError
from lowtide.memory import ranges
from tests.execute.training import away_bytes

BUDGET = 3 * 2**20
WIDTH = 300


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    yield
    if ranges._lingering is not None:
        lowtide.fit(budget="1GiB", policy="lru").close()
    assert away_bytes() == 0


class Odd(nn.Module):
    """Tied weights, nothing at all, one byte, and types of every width; those of 64 KiB and more can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.tied = self.first
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.turned = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())
        buffers = {
            "byte": torch.tensor([7], dtype=torch.uint8),
            "scalar": torch.tensor(3.5),
            "flags": torch.rand(200_000) > 0.5,
            "int8": torch.randint(-100, 100, (300_001,), dtype=torch.int8),
            "int64": torch.randint(-100, 100, (30_000,)),
            "e4m3": torch.randn(300_000).to(torch.float8_e4m3fn),
            "e5m2": torch.randn(300_000).to(torch.float8_e5m2),
            "brain": torch.randn(90_000).bfloat16(),
            "double_": torch.randn(30_000, dtype=torch.float64),
            "complex": torch.randn(WIDTH, WIDTH, dtype=torch.complex64),
        }
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


def odd(seed: int = 1) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def bits(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (one.dtype, one.shape, one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, one in model.state_dict().items()
    }


def as_safetensors(model: nn.Module, path: Path) -> Path:
    tensors = {name: one.contiguous() for name, one in model.state_dict().items() if name != "tied"}
    save_file(tensors, path / "odd.safetensors")
    return path / "odd.safetensors"


def as_torch_save(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path / "odd.pt")
    return path / "odd.pt"


def as_checkpoint(model: nn.Module, path: Path) -> Path:
    lowtide.save_checkpoint(path / "odd", model)
    return path / "odd"


@pytest.mark.parametrize("write", [as_safetensors, as_torch_save, as_checkpoint])
def test_unusual_tensors_come_back_to_the_bit(write: Callable[[nn.Module, Path], Path], tmp_path: Path) -> None:
    stock = odd()
    expected, path = bits(stock), write(stock, tmp_path)
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(lambda: odd(2), path)
        memory = ranges.current()
        assert memory is not None
        # What is large and lies in its file as the model has it is not read before it is used.
        assert memory.usage().counted.away > 2**20
    assert bits(model) == expected
    assert model.tied is model.first


def test_files_without_a_budget_are_read_as_they_are(tmp_path: Path) -> None:
    stock = odd()
    for write in (as_safetensors, as_torch_save, as_checkpoint):
        assert bits(lowtide.load(lambda: odd(2), write(stock, tmp_path))) == bits(stock)


def test_a_training_with_unusual_tensors_is_saved_and_loaded(tmp_path: Path) -> None:
    stock = odd()
    expected = bits(stock)
    with lowtide.fit(stock, budget=BUDGET, spill=tmp_path) as tide:
        tide.save(tmp_path / "saved")
    other = odd(2)
    with lowtide.fit(other, budget=2 * BUDGET, spill=tmp_path) as tide:
        tide.load(tmp_path / "saved")
        assert bits(other) == expected


def test_views_of_one_storage_that_overlap_are_saved_and_loaded(tmp_path: Path) -> None:
    class Overlapping(nn.Module):
        low: Tensor
        high: Tensor

        def __init__(self, seed: int) -> None:
            super().__init__()
            base = torch.randn(40_000, generator=torch.Generator().manual_seed(seed))
            self.register_buffer("low", base[:30_000])
            self.register_buffer("high", base[10_000:])

    first, second = Overlapping(1), Overlapping(2)
    with lowtide.fit(first, budget=BUDGET, spill=tmp_path) as tide:
        tide.save(tmp_path / "saved")
    lowtide.load_checkpoint(tmp_path / "saved", second)
    assert bits(second) == bits(first)
    second.low[20_000] = 5.0
    assert second.high[10_000] == 5.0, "they share their memory as before"


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def ones(value: float = 1.0) -> dict[str, Tensor]:
    return {"weight": torch.full((WIDTH, WIDTH), value), "bias": torch.full((WIDTH,), value)}


def loaded(path: Path, spill: Path) -> nn.Linear:
    with lowtide.init(budget=BUDGET, spill=spill):
        return lowtide.load(linear, path)


def test_of_several_files_the_one_with_the_usual_name_is_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save(ones(2.0), folder / "pytorch_model.bin")
    save_file(ones(), folder / "model.safetensors")
    save_file({"lora": torch.ones(3)}, folder / "adapter_model.safetensors")
    assert bool((loaded(folder, tmp_path).weight == 1.0).all())


def test_a_link_to_a_file_elsewhere_is_followed(tmp_path: Path) -> None:
    # As Hugging Face's cache has them.
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    save_file(ones(), blobs / "0123abcd")
    (snapshot / "model.safetensors").symlink_to("../blobs/0123abcd")
    assert bool((loaded(snapshot, tmp_path).weight == 1.0).all())


@pytest.mark.parametrize("index", [[], {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"weight": 5}}])
def test_an_index_of_another_kind_is_refused(index: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not an index of shards"):
        loaded(tmp_path, tmp_path)


WEIGHT_BYTES = WIDTH * WIDTH * 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data_offsets": [0, WEIGHT_BYTES // 2]}, "180000 bytes there, and 360000 by its shape"),
        ({"data_offsets": [0, WEIGHT_BYTES + 1]}, "360001 bytes there, and 360000 by its shape"),
        ({"dtype": "F16"}, "360000 bytes there, and 180000 by its shape"),
        ({"shape": [WIDTH, -WIDTH]}, "header cannot be read"),
        ({"shape": [float(WIDTH), WIDTH]}, "header cannot be read"),
        ({"data_offsets": [0.0, float(WEIGHT_BYTES)]}, "header cannot be read"),
        ({"data_offsets": [-8, WEIGHT_BYTES - 8]}, "reaches past its end"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, wrong)
    with pytest.raises(CheckpointCorrupted, match=message):
        loaded(path, tmp_path)


def test_a_type_that_pytorch_does_not_have_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"dtype": "F3"})
    model = linear()
    before = bits(model)
    with pytest.raises(CheckpointError, match=r"'weight' in .* is of type F3"):
        lowtide.load(model, path)
    assert bits(model) == before


def write_rows(folder: Path, wrong: dict[str, Any]) -> Path:
    """Write a file whose header says something else of the weight; the bias comes first."""
    end = WIDTH * 4
    header = {
        "bias": {"dtype": "F32", "shape": [WIDTH], "data_offsets": [WEIGHT_BYTES, WEIGHT_BYTES + end]},
        "weight": {"dtype": "F32", "shape": [WIDTH, WIDTH], "data_offsets": [0, WEIGHT_BYTES]} | wrong,
    }
    text = json.dumps(header).encode()
    path = folder / "wrong.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(WEIGHT_BYTES + end))
    return path
