"""Files at any offset are not read beyond their pages; an index has to tell the truth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lowtide
from lowtide.errors import CheckpointError
from lowtide.memory import ranges
from lowtide.memory.native import load
from tests.execute.training import away_bytes

MIB = 2**20


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    yield
    if ranges._lingering is not None:
        lowtide.fit(budget="1GiB", policy="lru").close()
    assert away_bytes() == 0


def read_bytes() -> int:
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"])


def test_a_tensor_that_begins_inside_a_page_costs_two_pages_more_at_most(tmp_path: Path) -> None:
    stock = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    save_file(stock.state_dict(), tmp_path / "a.safetensors", metadata={"pad": "x" * 333})
    with lowtide.init(budget=4 * MIB, spill=tmp_path):
        model = lowtide.load(
            lambda: nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))), tmp_path / "a.safetensors"
        )
        with torch.no_grad():
            model[5](torch.ones(1, 512))  # whatever is imported first
            before = read_bytes()
            model[1](torch.ones(1, 512))  # against the order, in which what follows is read ahead
            read = read_bytes() - before
    assert MIB <= read <= MIB + 3 * 4096


def test_an_index_that_names_what_its_shard_does_not_hold_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model-0.safetensors")
    index = {"weight": "model-0.safetensors", "bias": "model-0.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError):
        lowtide.load(model, tmp_path)
    assert torch.equal(model.weight, before)


def test_weights_that_begin_inside_a_page_are_read_in_whole_pieces(tmp_path: Path) -> None:
    """A piece lies in one page of the file more than it has; a read of that page alone takes as long as a large one."""
    weight, piece = torch.arange(2**24, dtype=torch.float32), 2 * 2**20

    def reads() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["syscr"])

    save_file({"weight": weight}, tmp_path / "model.safetensors", metadata={"pad": "x" * 333})

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty_like(weight))

    with lowtide.init(budget=2 * weight.nbytes, spill=tmp_path):
        model = lowtide.load(Module, tmp_path / "model.safetensors")
        before = reads()
        assert float(model.weight.detach()[-1]) == float(weight[-1])
        made = reads() - before
        assert torch.equal(model.weight.detach(), weight)
    assert weight.nbytes // piece <= made <= weight.nbytes // piece + 4, "one in five was for a single page"


def test_weights_are_read_ahead_in_the_models_order_whatever_their_order_in_the_file(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(24)))

    save_file(build().state_dict(), tmp_path / "model.safetensors")  # by name: 0, 1, 10, 11, ..., 2, 20, ...
    with lowtide.init(budget=12 * MIB, spill=tmp_path):
        model = lowtide.load(build, tmp_path / "model.safetensors")
        native = load()
        before = native.range_counters()
        for weight in model.parameters():
            native.settle()  # what is under way has the time that the program works
            weight.detach().any()
        after = native.range_counters()
    assert after.read - before.read == 24 * MIB
    assert after.waits - before.waits == 2, "weights were read when they were used, and not ahead"
