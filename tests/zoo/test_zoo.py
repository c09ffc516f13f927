"""The zoo's models are the published ones, at any size, and train."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide import zoo
from lowtide.core.spelling import bare
from lowtide.errors import BadArgument
from lowtide.zoo.resnet import stages
from tests.zoo.sizes import SMALL


@pytest.fixture(autouse=True, scope="module")
def one_compute_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(name: str, **sizes: Any) -> int:
    """Return the parameters of a model of any size, without making them."""
    with FakeTensorMode():
        return sum(p.numel() for p in zoo.build(name, batch=1, **sizes).model.parameters())


# The counts that the papers' reference implementations have.
PUBLISHED = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "inception_v3": 23_834_568,  # without the auxiliary classifier
    "densenet121": 7_978_856,
    "vit": 86_567_656,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet101": 44_549_160,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
    "tinyllama": 1_100_048_384,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "llama-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "sd-unet": 859_520_964,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_parameters_of_the_published_one(name: str) -> None:
    assert parameters(name) == PUBLISHED[name]


def test_the_large_models_have_the_size_that_names_them() -> None:
    assert parameters("gpt3-175b") == pytest.approx(175e9, rel=0.005)
    assert parameters("gpt2_xl") == pytest.approx(1.558e9, rel=0.001)
    assert parameters("bert_base") == pytest.approx(109e6, rel=0.01)
    assert parameters("bert_large") == pytest.approx(335e6, rel=0.01)
    assert parameters("unet") == pytest.approx(31e6, rel=0.01)


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_trains_and_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(1)
    model, inputs, loss, optimizer = zoo.build(name, **SMALL[name])
    before = [p.detach().clone() for p in model.parameters()]
    loss(model(*inputs)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer(model.parameters()).step()
    assert any(not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def test_every_model_is_tried_at_a_small_size() -> None:
    targets = {zoo.find(name).target for name in SMALL}
    assert targets == {entry.target for entry in zoo.MODELS.values()}


@pytest.mark.parametrize("depth", [50, 101, 152, 200, 302])
def test_a_resnet_is_as_deep_as_it_says(depth: int) -> None:
    with FakeTensorMode():
        model = zoo.build("resnet", batch=1, depth=depth).model
    beside = {id(m) for name, m in model.named_modules() if ".shortcut." in name}
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear) and id(m) not in beside]
    assert len(layers) == depth


def test_an_impossible_depth_is_answered_with_a_possible_one() -> None:
    with pytest.raises(BadArgument, match="such as 50"):
        stages(51)
    with pytest.raises(BadArgument, match="such as 53"):
        stages(52)
    assert sum(stages(53)) * 3 + 2 == 53
    with pytest.raises(BadArgument, match="such as 35"):
        stages(8)
    assert sum(stages(35)) * 3 + 2 == 35


def test_batch_and_precision_are_as_asked_for() -> None:
    workload = zoo.build("vgg16", batch=7, image=32, width=2, dtype="bfloat16")
    assert workload.inputs[0].shape == (7, 3, 32, 32)
    assert {p.dtype for p in workload.model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("name", "sizes", "hint"),
    [
        ("resnet51", {}, "did you mean 'resnet50'"),
        ("nothing", {}, "choose one of alexnet"),
        ("resnet50", {"batch": 0}, "1 or more"),
        ("resnet50", {"dtype": "int8"}, "choose one of float32"),
        ("resnet50", {"layers": 3}, "it has depth=50"),
        ("resnet50", {"width": 0}, "must be 1 or more"),
        ("resnet50", {"width": 1.5}, "must be of type int"),
        ("vgg16", {"norm": 1}, "must be of type bool"),
        ("densenet121", {"depth": 120}, "121, 169, 201"),
        ("unet", {"image": 100}, "multiple of 16"),
        ("vit", {"image": 225}, "multiple of the patch"),
        ("gpt", {"heads": 7}, "multiple of the heads"),
    ],
)
def test_a_wrong_name_or_size_is_answered_with_the_right_ones(name: str, sizes: dict[str, Any], hint: str) -> None:
    with pytest.raises(BadArgument, match=hint) as caught:
        zoo.build(name, **{"batch": 1, **sizes})
    assert "\n" not in str(caught.value)


def test_names_are_known_without_torch_and_in_any_spelling() -> None:
    assert zoo.find("GPT3-175B") is zoo.MODELS["gpt3_175b"]
    assert zoo.find("Llama7B") is zoo.MODELS["llama_7b"]
    assert zoo.find("gpt-2 XL") is zoo.MODELS["gpt2_xl"]
    assert zoo.find("qwen") is zoo.MODELS["qwen2_7b"]
    assert zoo.find("Qwen/Qwen2.5-7B-Instruct") is zoo.MODELS["qwen2_7b"]
    assert zoo.find("meta-llama/Llama-2-7b-chat-hf") is zoo.MODELS["llama_7b"]
    assert zoo.find("meta-llama/Meta-Llama-3-8B-Instruct") is zoo.MODELS["llama3_8b"]
    assert zoo.find("mistralai/Mistral-7B-Instruct-v0.2") is zoo.MODELS["mistral_7b"]
    assert zoo.find("vit-base") is zoo.MODELS["vit"]
    assert zoo.sizes_of("gpt3_175b")["layers"] == 96
    code = "import sys; from lowtide import zoo; zoo.find('vit'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_of_the_zoo_names_every_model_and_every_size() -> None:
    page = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text(encoding="utf-8")
    assert [name for name in zoo.names() if f"`{name}`" not in page] == []
    table = [line for line in page.splitlines() if line.startswith("| `")]
    for line in table:
        name = line.split("`")[1]
        missing = [size for size in zoo.sizes_of(name) if size not in line]
        assert missing in ([], ["fused", "dropout"]), (name, missing)


def test_no_two_models_share_the_letters_of_their_names() -> None:
    meant: dict[str, set[str]] = {}
    for name, model in {**{name: name for name in zoo.MODELS}, **zoo.ALIASES}.items():
        meant.setdefault(bare(name), set()).add(model)
    assert {name: models for name, models in meant.items() if len(models) > 1} == {}
