"""Weights stay in their checkpoint's files until they are touched: nothing else is read, nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lowtide
from lowtide.checkpoint.in_place import InPlaceFile
from lowtide.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch
from lowtide.memory import ranges
from lowtide.memory.native.bindings import Place
from tests.checkpoint.trainings import Net, Run
from tests.execute.training import away_bytes, digest

MIB = 2**20
WIDTH, DEPTH = 512, 12  # a MiB a layer
BUDGET = 4 * MIB


class Stack(nn.Module):
    """Layers of a MiB, a weight with two names, and a buffer that no checkpoint has."""

    scale: Tensor

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.head.weight = self.layers[0].weight
        self.register_buffer("scale", torch.linspace(1, 2, WIDTH, dtype=dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * self.scale
        return self.head(x)


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    yield
    if ranges._lingering is not None:
        lowtide.fit(budget="1GiB", policy="lru").close()
    assert ranges._lingering is None
    assert away_bytes() == 0


def digests(model: nn.Module, dtype: torch.dtype | None = None) -> list[str]:
    """Return the bits of a model's weights: no tensors that a budget would have to make room for."""
    return [digest(parameter.to(dtype or parameter.dtype).view(torch.uint8)) for parameter in model.parameters()]


def saved(path: Path, *, shards: int = 1, dtype: torch.dtype = torch.float32, pad: int = 0) -> Stack:
    """Write a model as Hugging Face does: tied weights once, an index where there are several files."""
    torch.manual_seed(2)
    model = Stack().to(dtype)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "head.weight"}
    names = list(tensors)
    path.mkdir(exist_ok=True)
    for shard in range(shards):
        part = {name: tensors[name] for name in names[shard::shards]}
        file = "model.safetensors" if shards == 1 else f"model-{shard}.safetensors"
        save_file(part, path / file, metadata={"pad": "x" * pad})
    if shards > 1:
        index = {name: f"model-{shard}.safetensors" for shard in range(shards) for name in names[shard::shards]}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return model


def call(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype))


def usage() -> Any:
    memory = ranges.current()
    assert memory is not None
    return memory.usage()


def place(tensor: Tensor) -> Place | None:
    memory = ranges.current()
    assert memory is not None
    return memory.place(tensor)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("pad", [0, 333])  # the payload begins at other bytes of a page
def test_a_model_is_served_from_its_files(shards: int, pad: int, tmp_path: Path) -> None:
    expected = call(saved(tmp_path / "checkpoint", shards=shards, pad=pad))
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(Stack, tmp_path / "checkpoint")
        assert usage().counted.read == 0, "nothing is read before it is used"
        assert place(model.layers[3].weight) is Place.AWAY
        assert model.head.weight is model.layers[0].weight
    with lowtide.serve(model, budget=BUDGET, spill=tmp_path) as tide:
        assert usage().counted.read == 0
        for _ in range(4):
            assert torch.equal(call(model), expected)
        stats: dict[str, Any] = tide.stats()
    assert stats["swapped_out_bytes"] == 0, "there is no second copy"
    assert stats["peak_reserved_bytes"] <= BUDGET
    assert stats["swapped_in_bytes"] >= 8 * MIB


def test_weights_that_a_plan_keeps_are_not_written_if_they_leave_all_the_same(tmp_path: Path) -> None:
    expected = call(saved(tmp_path / "checkpoint"))
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(Stack, tmp_path / "checkpoint")
    with lowtide.serve(model, budget=BUDGET, spill=tmp_path) as tide:
        for _ in range(4):
            call(model)
        plan, native = tide.plan(), ranges.current().native  # type: ignore[union-attr]
        assert plan is not None
        try:
            native.stress(1, 11)  # all that may leave does, at every operator: the weights that the plan keeps, too
            for _ in range(3):
                assert torch.equal(call(model), expected)
        finally:
            native.stress(0, 0)
        assert tide.plan() is plan
        stats: dict[str, Any] = tide.stats()
    assert stats["swapped_out_bytes"] == 0, "there is no second copy"


def test_only_what_is_used_is_read(tmp_path: Path) -> None:
    with torch.no_grad():
        expected = saved(tmp_path / "checkpoint").layers[5](torch.ones(1, WIDTH))
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(Stack, tmp_path / "checkpoint")
        with torch.no_grad():
            assert torch.equal(model.layers[5](torch.ones(1, WIDTH)), expected)
        assert usage().counted.read == MIB


def test_a_model_that_exists_is_given_its_weights_in_place(tmp_path: Path) -> None:
    expected = call(saved(tmp_path / "checkpoint"))
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        torch.manual_seed(99)
        model = Stack()
        address = model.layers[4].weight.untyped_storage()._cdata
        counted = usage().counted
        most = counted.written + counted.leaving  # room for the next parameter is made as one is filled
        assert lowtide.load(model, tmp_path / "checkpoint") is model
        assert model.layers[4].weight.untyped_storage()._cdata == address
        assert torch.equal(call(model), expected)
        assert usage().counted.written <= most


def test_without_a_budget_weights_are_read(tmp_path: Path) -> None:
    expected = call(saved(tmp_path / "checkpoint"))
    assert ranges.current() is None
    model = lowtide.load(Stack, tmp_path / "checkpoint")
    assert torch.equal(call(model), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_weights_are_widened_as_they_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = digests(saved(tmp_path / "checkpoint", dtype=dtype), torch.float32)
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(Stack, tmp_path / "checkpoint")
        assert place(model.layers[3].weight) is Place.AWAY
        assert bool(sum(parameter.sum() for parameter in model.parameters()).isfinite())  # type: ignore[union-attr]
        assert usage().counted.written == 0
        assert digests(model) == expected


def test_every_half_is_widened_to_the_bit(tmp_path: Path) -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    tensors = {"half": halves.view(torch.float16).clone(), "brain": halves.view(torch.bfloat16).clone()}
    save_file(tensors, tmp_path / "a.safetensors")
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        file = InPlaceFile(tmp_path / "a.safetensors", ranges.current())
        for name, tensor in tensors.items():
            wide = torch.empty(2**16)
            file.give(name, wide)
            assert place(wide) is Place.AWAY
            same = wide.view(torch.int32) == tensor.float().view(torch.int32)
            # PyTorch's kernels and the processor disagree on the bits of numbers that are none.
            assert bool((same | tensor.isnan()).all()), name
            assert bool((wide.isnan() == tensor.isnan()).all()), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pad", [0, 333])
def test_wide_weights_are_narrowed_as_they_are_read(dtype: torch.dtype, pad: int, tmp_path: Path) -> None:
    expected = digests(saved(tmp_path / "checkpoint", pad=pad), dtype)
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(lambda: Stack(dtype=dtype), tmp_path / "checkpoint")
        assert place(model.layers[3].weight) is Place.AWAY
        assert usage().counted.read == 0
        assert bool(sum(parameter.sum() for parameter in model.parameters()).isfinite())  # type: ignore[union-attr]
        assert usage().counted.written == 0, "there is no second copy"
        assert digests(model) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_floats_are_narrowed_as_pytorch_rounds_them(dtype: torch.dtype, tmp_path: Path) -> None:
    # Every exponent, and mantissas on both sides of, and at, what lies between two numbers.
    high = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    floats = (high | low).flatten().to(torch.int32).view(torch.float32)
    save_file({"wide": floats}, tmp_path / "a.safetensors")
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        narrow = torch.empty(len(floats), dtype=dtype)
        InPlaceFile(tmp_path / "a.safetensors", ranges.current()).give("wide", narrow)
        assert place(narrow) is Place.AWAY
        same = narrow.view(torch.int16) == floats.to(dtype).view(torch.int16)
        # PyTorch's kernels disagree among each other on the bits of numbers that are none.
        assert bool((same | floats.isnan()).all())
        assert bool((narrow.isnan() == floats.isnan()).all())


def test_other_conversions_are_made_at_once(tmp_path: Path) -> None:
    expected = digests(saved(tmp_path / "checkpoint"), torch.float64)
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(lambda: Stack(dtype=torch.float64), tmp_path / "checkpoint")
        assert digests(model) == expected


def double(model: Stack) -> None:
    with torch.no_grad():
        for layer in list(model.layers)[::2]:
            layer.weight.mul_(2)


def test_weights_that_change_are_written_to_the_spill_and_not_to_the_checkpoint(tmp_path: Path) -> None:
    stock = saved(tmp_path / "checkpoint")
    double(stock)
    expected = call(stock)
    del stock
    content = (tmp_path / "checkpoint" / "model.safetensors").read_bytes()
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(Stack, tmp_path / "checkpoint")
        double(model)
        for _ in range(2):
            assert torch.equal(call(model), expected)
        assert usage().counted.written >= 3 * MIB
    assert (tmp_path / "checkpoint" / "model.safetensors").read_bytes() == content


def train(model: nn.Module, step: Callable[[], Any]) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with step():
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return digests(model)


@pytest.mark.slow
def test_training_begins_from_a_checkpoint_in_place(tmp_path: Path) -> None:
    expected = train(saved(tmp_path / "checkpoint"), nullcontext)
    with lowtide.init(budget=8 * MIB, spill=tmp_path):
        model = lowtide.load(Stack, tmp_path / "checkpoint")
    with lowtide.fit(model, budget=8 * MIB, spill=tmp_path) as tide:
        assert train(model, tide.step) == expected


def test_a_saved_training_is_served_in_place(tmp_path: Path) -> None:
    run = Run()
    run.steps(2)
    lowtide.save_checkpoint(tmp_path / "saved", run.model, run.optimizer)
    expected = digests(run.model)
    del run
    with lowtide.init(budget=2**21, spill=tmp_path):
        model = lowtide.load(Net, tmp_path / "saved")
        assert place(model.frozen) is Place.AWAY
        assert model.count == 2
        assert digests(model) == expected


def test_files_that_a_program_opens_itself_are_read_in_place(tmp_path: Path) -> None:
    expected = digests(saved(tmp_path / "checkpoint").layers[3])[0]
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        tensors = load_file(tmp_path / "checkpoint" / "model.safetensors")
        assert place(tensors["layers.3.weight"]) is Place.AWAY
        assert usage().counted.read == 0
        assert digest(tensors["layers.3.weight"].view(torch.uint8)) == expected
        del tensors
    assert load_file(tmp_path / "checkpoint" / "model.safetensors")["layers.3.weight"].shape == (WIDTH, WIDTH)


def test_from_pretrained_reads_in_place(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000
    )
    torch.manual_seed(3)
    stock = transformers.LlamaForCausalLM(config).eval()
    stock.save_pretrained(tmp_path / "checkpoint", max_shard_size="2MB")
    words = torch.arange(4)[None]
    with torch.no_grad():
        expected = stock(words).logits
    del stock
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
        assert usage().counted.read == 0
    with lowtide.serve(model, budget=BUDGET, spill=tmp_path) as tide, torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(words).logits, expected)
        stats: dict[str, Any] = tide.stats()
    assert stats["swapped_out_bytes"] == 0


# ---- what goes wrong ----


def test_a_file_that_is_cut_or_changed_under_way_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "model.safetensors"
    with pytest.raises(CheckpointCorrupted, match=r"model\.safetensors was cut while the model is in use"):
        with lowtide.init(budget=BUDGET, spill=tmp_path):
            model = lowtide.load(Stack, tmp_path / "checkpoint")
            os.truncate(file, file.stat().st_size // 2)
            call(model)
    saved(tmp_path / "checkpoint")
    with pytest.raises(CheckpointCorrupted, match=r"model\.safetensors was changed while the model is in use"):
        with lowtide.init(budget=BUDGET, spill=tmp_path):
            model = lowtide.load(Stack, tmp_path / "checkpoint")
            with file.open("r+b") as changed:
                changed.seek(-1, os.SEEK_END)
                changed.write(b"x")
            call(model)


def test_a_file_that_is_removed_under_way_is_read_all_the_same(tmp_path: Path) -> None:
    expected = call(saved(tmp_path / "checkpoint"))
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(Stack, tmp_path / "checkpoint")
        (tmp_path / "checkpoint" / "model.safetensors").unlink()
        assert torch.equal(call(model), expected)


def test_a_forked_child_reads_from_the_file_itself(tmp_path: Path) -> None:
    expected = call(saved(tmp_path / "checkpoint"))
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(Stack, tmp_path / "checkpoint")
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(call(model), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(call(model), expected)


@pytest.mark.parametrize("nested", [False, True])
def test_files_of_torch_save_are_read_in_place(nested: bool, tmp_path: Path) -> None:
    stock = saved(tmp_path / "checkpoint")
    path = tmp_path / "model.pt"
    state = {name: one for name, one in stock.state_dict().items() if name != "head.weight"}
    torch.save({"epoch": 3, "state_dict": state} if nested else state, path)
    expected = call(stock)
    del stock, state  # they would leave, too
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(Stack, path)
        assert usage().counted.read == 0, "nothing is read before it is used"
        assert torch.equal(call(model), expected)
        assert usage().counted.written == 0, "there is no second copy"


def test_a_folder_of_torch_save_files_is_read_in_place(tmp_path: Path) -> None:
    stock = saved(tmp_path / "other", dtype=torch.bfloat16)
    state = {name: one for name, one in stock.state_dict().items() if name != "head.weight"}
    folder, names = tmp_path / "checkpoint", list(state)
    folder.mkdir()
    index = {}
    for shard in range(2):
        file = f"pytorch_model-{shard}.bin"
        torch.save({name: state[name] for name in names[shard::2]}, folder / file)
        index |= dict.fromkeys(names[shard::2], file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = lowtide.load(Stack, folder)
        assert usage().counted.read == 0
        assert digests(model) == digests(stock, torch.float32), "widened as they are read"


def test_a_torch_save_file_that_is_cut_or_runs_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(saved(tmp_path / "checkpoint").state_dict(), path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointCorrupted, match="damaged"):
        lowtide.load(Stack, path)
    torch.save({"weights": Path("mine")}, path)
    with pytest.raises(CheckpointError, match=r"save model\.state_dict\(\) alone"):
        lowtide.load(Stack, path)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint")
    with pytest.raises(CheckpointMismatch, match=r"is not of this Linear: 2 missing there .* 24 unknown here"):
        lowtide.load(lambda: nn.Linear(2, 2), tmp_path / "checkpoint")
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "linear.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"'weight' is \[2, 3\] there, \[2, 2\] here"):
        lowtide.load(lambda: nn.Linear(2, 2), tmp_path / "linear.safetensors")
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        (tmp_path / "empty").mkdir()
        lowtide.load(Stack, tmp_path / "empty")


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    stock = saved(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "model.safetensors"
    tensors = {name: one for name, one in load_file(file).items() if name != "layers.3.bias"}
    save_file(tensors, file)
    torch.manual_seed(9)
    model = Stack()
    before = digests(model)
    with pytest.raises(CheckpointMismatch, match=r"1 missing there \(layers\.3\.bias\)"):
        lowtide.load(model, tmp_path / "checkpoint")
    assert digests(model) == before != digests(stock)
