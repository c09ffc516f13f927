"""`lowtide estimate` and `lowtide capture --model`: what they answer, and what they refuse in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lowtide
from lowtide import zoo
from lowtide.cli import main
from lowtide.core.serialize import load_trace, save
from lowtide.estimate import machine
from lowtide.testing.traces import chain_trace

VGG = ("--model", "vgg16", "--batch", "8", "--size", "image=64", "--size", "width=16")


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main([*argv, "--json"]) == 0, capsys.readouterr().err
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_a_model_that_fits_is_said_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "estimate", *VGG, "--machine", "v100")
    assert answer["fits_unmanaged"] is True
    assert answer["budget_bytes"] == machine("v100").capacity_bytes
    assert answer["moved_out_bytes"] == 0
    assert answer["slowdown"] == pytest.approx(1.0)
    assert main(["estimate", *VGG, "--machine", "v100"]) == 0
    assert "fits without moving anything" in capsys.readouterr().out


def test_a_smaller_budget_moves_bytes_and_takes_no_less_time(capsys: pytest.CaptureFixture[str]) -> None:
    free = told(capsys, "estimate", *VGG, "--machine", "rtx4090")
    budget = (int(str(free["floor_bytes"])) + int(str(free["peak_bytes"]))) // 2
    tight = told(capsys, "estimate", *VGG, "--machine", "rtx4090", "--budget", str(budget), "--no-recompute")
    assert tight["fits_unmanaged"] is False
    assert int(str(tight["managed_peak_bytes"])) <= budget
    assert int(str(tight["moved_out_bytes"])) > 0
    assert float(str(tight["slowdown"])) >= 0.999
    assert tight["reserved_bytes"] == free["reserved_bytes"]
    assert main(["estimate", *VGG, "--machine", "rtx4090", "--budget", str(budget)]) == 0
    assert "fits with policy auto" in capsys.readouterr().out


def test_a_captured_trace_is_estimated_as_the_model_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "v.trace"
    captured = told(capsys, "capture", "--out", str(path), *VGG, "--fake", "--machine", "a100")
    assert captured["times"] == "predicted for a100"
    trace = load_trace(path)
    assert (trace.model, trace.peak_bytes) == ("vgg16", captured["peak_bytes"])
    here = told(capsys, "estimate", str(path), "--machine", "v100")
    there = told(capsys, "estimate", *VGG, "--machine", "v100")
    assert here["peak_bytes"] == there["peak_bytes"]
    # A trace knows whole storages only; the model's own estimate knows the views that operators read.
    assert float(str(here["step_s"])) == pytest.approx(float(str(there["step_s"])), rel=0.05)


def test_a_model_is_run_and_measured_without_fake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "v.trace"
    answer = told(capsys, "capture", "-o", str(path), *VGG)
    assert answer["times"] == "measured"
    assert float(str(answer["flops"])) > 1e9
    assert main(["capture", "-o", str(path), *VGG, "--fake"]) == 0
    assert "predicted for cpu" in capsys.readouterr().out


def test_a_script_may_follow_two_hyphens_and_its_operations_are_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script, path = tmp_path / "train.py", tmp_path / "s.trace"
    script.write_text(
        "import sys, torch\n"
        "assert sys.argv[1:] == ['--fake', 'x']\n"
        "model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 8))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(9):\n"
        "    model(torch.randn(512, 256)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "raise AssertionError('the script goes on')\n"
    )
    assert main(["capture", "--json", "-o", str(path), "--", str(script), "--fake", "x"]) == 0
    forward = 2 * 512 * (256 * 512 + 512 * 8)
    # Backward is twice that, but for the first layer's input, which needs no gradient.
    assert json.loads(capsys.readouterr().out)["flops"] == 3 * forward - 2 * 512 * 256 * 512


def test_a_budget_below_the_floor_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *VGG, "--machine", "v100", "--budget", "1MiB"]) == 2
    line = capsys.readouterr().err
    assert "raise the budget" in line
    assert "aten::" in line


def test_bad_arguments_are_refused_with_what_to_pass(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "t")
    assert "v100-nvlink" in refused(capsys, "estimate", *VGG, "--machine", "v1000")
    assert "did you mean 'vgg16'" in refused(capsys, "estimate", "--model", "vgg17", "--machine", "v100")
    assert "trace or --model NAME" in refused(capsys, "estimate", "--machine", "v100")
    assert "does not exist" in refused(capsys, "estimate", str(tmp_path / "no"), "--machine", "v100")
    assert "it has image=224" in refused(capsys, "estimate", "--model", "vgg16", "--size", "x=1", "--machine", "v100")
    assert "NAME=N" in refused(capsys, "estimate", "--model", "vgg16", "--size", "width", "--machine", "v100")
    assert "need --model" in refused(capsys, "estimate", "x.trace", "--batch", "3", "--machine", "v100")
    assert "pass 1 or more" in refused(capsys, "estimate", "--model", "vgg16", "--batch", "0", "--machine", "v100")
    small = ("--model", "inception_v3", "--size", "image=20")
    assert "cannot be trained with these sizes" in refused(capsys, "estimate", *small, "--machine", "v100")
    assert "a script or --model" in refused(capsys, "capture", "-o", out)
    assert "a script or --model" in refused(capsys, "capture", "-o", out, *VGG, "train.py")
    assert "need --model" in refused(capsys, "capture", "-o", out, "--fake", "train.py")
    path = tmp_path / "chain.trace"
    save(chain_trace(4), path)
    assert "does not know its floating-point" in refused(capsys, "estimate", str(path), "--machine", "v100")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["chain.trace"]


def test_a_machine_may_be_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.machine"
    save(machine("titan-x"), path)
    answer = told(capsys, "estimate", *VGG, "--machine", str(path))
    assert answer["machine"] == "titan-x"


def test_here_is_the_machine_that_was_probed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowtide.estimate.calibrate import save_machine

    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    assert "run 'lowtide probe'" in refused(capsys, "estimate", *VGG, "--machine", "here")
    save_machine(machine("cpu"), directories=[tmp_path])
    assert told(capsys, "estimate", *VGG, "--machine", "here")["machine"] == "cpu"


def test_a_step_that_does_not_fit_gets_a_table_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "gpt2", "--size", "layers=2", "--batch", "4", "--machine", "v100", "--budget", "400MiB"]
    assert main(["estimate", *options]) == 2
    captured = capsys.readouterr()
    rows = {line.split("  ")[0] for line in captured.out.splitlines()}
    assert {"weights", "gradients", "optimizer state", "activations", "floor", "verdict", "would fit"} <= rows
    assert "does not fit" in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80
    assert captured.err.count("\n") == 1
    assert main(["estimate", *options, "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert not answer["fits"]
    at_peak = sum(share["at_peak_bytes"] for share in answer["parts"].values())
    assert at_peak == answer["peak_bytes"]
    remedies = {remedy["change"]: remedy["needed_bytes"] for remedy in answer["remedies"]}
    assert any("bfloat16" in change for change in remedies)
    assert max(remedies.values()) == answer["floor_bytes"]


def test_the_parts_are_those_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model", "gpt2", "--size", "layers=2", "--machine", "v100", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    weights = (50257 + 1024 + 2) * 768 + 2 * (12 * 768**2 + 13 * 768)
    assert parts["weights"]["most_bytes"] == 4 * weights
    assert parts["gradients"]["most_bytes"] == pytest.approx(4 * weights, rel=1e-3), "the smallest are not told apart"
    assert parts["optimizer state"]["most_bytes"] == pytest.approx(8 * weights, rel=1e-4)


def test_an_optimizers_operator_is_called_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model", "vit", "--batch", "1", "--machine", "v100", "--budget", "20MiB"]) == 2
    captured = capsys.readouterr()
    assert "in the optimizer's step, which needs at least" in captured.err
    assert "shrink the batch" not in captured.err
    assert "in the optimizer's step" in captured.out


@pytest.mark.parametrize(
    "name", ["llama-7b", "mistral-7b", "qwen", "gpt2-xl", "bert-large", "sd-unet", "resnet", "vit"]
)
def test_names_that_people_know_are_found(name: str) -> None:
    zoo.find(name)


def test_fast_memory_above_slow_memory_is_a_share_of_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "estimate", *VGG, "--machine", "optane", "--fast", "25%", "--policy", "deeptm")
    assert answer["fits"] is True
    assert answer["budget_bytes"] == int(0.25 * int(str(answer["peak_bytes"])))
    assert int(str(answer["placed_bytes"])) > 0
    assert float(str(answer["slowdown"])) >= 1.0
    assert main(["estimate", *VGG, "--machine", "optane", "--fast", "25%", "--policy", "deeptm"]) == 0
    assert "of the peak costs" in capsys.readouterr().out


def test_fast_memory_needs_slow_memory_and_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no slow memory" in refused(capsys, "estimate", *VGG, "--machine", "v100", "--fast", "40%")
    assert "such as 40%" in refused(capsys, "estimate", *VGG, "--machine", "optane", "--fast", "2GiB")
    both = ("--machine", "optane", "--fast", "40%", "--budget", "1GiB")
    assert "pass one of them" in refused(capsys, "estimate", *VGG, *both)


LLAMA = ("--model", "llama", "--size", "layers=4", "--size", "width=256", "--size", "heads=4", "--size", "kv_heads=4")
LLAMA = (*LLAMA, "--size", "vocab=512", "--size", "hidden=512", "--size", "tokens=32")


def test_on_a_cpu_the_state_can_leave_and_estimate_answers_as_fit_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    free = told(capsys, "estimate", *LLAMA, "--machine", "cpu")
    budget = int(str(free["static_bytes"])) // 2
    answer = told(capsys, "estimate", *LLAMA, "--machine", "cpu", "--budget", str(budget))
    assert answer["fits"] is True
    assert int(str(answer["floor_bytes"])) < budget < int(str(answer["static_bytes"]))
    # As fit does: it trains inside that budget, and refuses one below the floor.
    workload = zoo.build("llama", batch=1, layers=4, width=256, heads=4, kv_heads=4, vocab=512, hidden=512, tokens=32)
    training = workload.training()
    assert training.optimizer is not None
    with lowtide.fit(workload.model, training.optimizer, budget=budget, spill=tmp_path) as tide:
        for _ in range(2):
            with tide.step():
                training.step()
        assert int(str(tide.stats()["peak_bytes"])) <= budget
        assert tide.trace().floor_bytes() == answer["floor_bytes"]
    # On an accelerator it cannot: there what autograd saves leaves.
    assert main(["estimate", *LLAMA, "--machine", "v100", "--budget", str(budget)]) == 2


def test_a_capture_for_a_cpu_plans_as_the_estimate_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "step.trace")
    told(capsys, "capture", "-o", path, *LLAMA, "--fake", "--machine", "cpu")
    free = told(capsys, "estimate", *LLAMA, "--machine", "cpu")
    asked = ("--machine", "cpu", "--budget", str(int(str(free["static_bytes"])) // 2))
    planned = told(capsys, "plan", *asked, path)
    estimated = told(capsys, "estimate", *LLAMA, *asked)
    # A trace knows whole storages only; the model's own estimate knows the views that operators read.
    assert float(str(planned["predicted_step_s"])) == pytest.approx(float(str(estimated["managed_step_s"])), rel=0.01)
    assert load_trace(path).floor_bytes() == estimated["floor_bytes"]


def test_the_table_tells_what_a_day_of_training_writes_and_reads(capsys: pytest.CaptureFixture[str]) -> None:
    free = told(capsys, "estimate", *LLAMA, "--machine", "cpu")
    line = ("estimate", *LLAMA, "--machine", "cpu", "--budget", str(int(str(free["static_bytes"])) // 2))
    answer = told(capsys, *line)
    steps = 86400 / float(str(answer["managed_step_s"]))
    assert answer["written_bytes_per_day"] == pytest.approx(int(str(answer["moved_out_bytes"])) * steps)
    assert answer["read_bytes_per_day"] == pytest.approx(int(str(answer["moved_in_bytes"])) * steps)
    assert int(str(answer["moved_in_bytes"])) > 0
    assert main(line) == 0
    assert "moved in a day" in capsys.readouterr().out


def test_where_every_tensor_can_leave_the_state_is_no_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *VGG, "--machine", "cpu", "--budget", "1MiB", "--json"]) == 2
    changes = [remedy["change"] for remedy in json.loads(capsys.readouterr().out)["remedies"]]
    # An accelerator with as much memory would have to hold the state, too.
    assert changes[0].startswith("a larger budget: ")
    assert "cpu (24.0 GiB)" in changes[0]
    assert not any(name in changes[0] for name in ("gtx1080", "v100", "a100"))
    assert not any("optimizer" in change or "LoRA" in change for change in changes)
