"""safetensors files that are streamed are those that safetensors writes, to the byte."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lowtide
from lowtide.memory.streamed_files import StreamedFiles

MIB = 2**20

TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.int16, torch.uint16,
    torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64,
    torch.int64, torch.uint64,
]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {f"{kind}.{number}": torch.ones(3, number).to(kind) for number in (2, 0, 11) for kind in TYPES}
    return made | {"Z\u00fcrich": torch.arange(5.0), "scalar": torch.tensor(2.5), 'a "b"': torch.arange(3)}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_file_is_the_same_to_the_byte(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "stock", metadata=metadata)
    streamed = StreamedFiles(lambda _tensor: nullcontext(), most_bytes=0)
    streamed.on()
    try:
        save_file(tensors(), tmp_path / "ours", metadata=metadata)
        with pytest.raises(ValueError, match="non contiguous"):
            save_file({"t": torch.ones(3, 4).T}, tmp_path / "other")
        shared = torch.ones(8)
        with pytest.raises(RuntimeError, match="share memory"):
            save_file({"a": shared, "b": shared}, tmp_path / "other")
    finally:
        streamed.off()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "stock").read_bytes()


def test_what_is_larger_than_the_budget_is_saved_inside_it(tmp_path: Path) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))

    save_file(build().state_dict(), tmp_path / "stock")
    with lowtide.init(budget=6 * MIB, spill=tmp_path):
        model = build()
    with lowtide.serve(model, budget=6 * MIB, spill=tmp_path) as tide:
        save_file(model.state_dict(), tmp_path / "ours")
        stats = tide.stats()
    assert stats["peak_reserved_bytes"] <= 6 * MIB  # type: ignore[operator]
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "stock").read_bytes()
