"""`lowtide estimate --inference` and `--checkpoint`: generation, from headers and shapes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lowtide.cli import main
from lowtide.core.machine import Link, Machine
from lowtide.core.units import format_bytes
from lowtide.estimate.inference import Inference, Weight, served

CACHE_BYTES = 2 * 2 * 2 * 16 * 4 * 1024  # keys and values, layers, heads, their width, tokens
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file({f"layers.{index}.weight": torch.zeros(256, 1024) for index in range(8)}, folder / "model.safetensors")
    return folder


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["estimate", *argv, "--json"]) == 0, capsys.readouterr().err
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_checkpoint_is_estimated_from_its_headers(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "--checkpoint", str(checkpoint), "--inference", "--machine", "v100", "--budget", "4MiB")
    assert answer["weights_bytes"] == 8 * 2**20
    assert answer["cache_bytes"] == CACHE_BYTES
    assert answer["read_bytes_per_day"] == pytest.approx(answer["read_bytes_per_word"] * 86400 / answer["word_s"])
    assert answer["floor_bytes"] == 2**20 + answer["cache_bytes"]
    assert answer["read_bytes_per_word"] == 8 * 2**20 - (4 * 2**20 - answer["cache_bytes"] - 2 * 2**20)
    assert main(["estimate", "--checkpoint", str(checkpoint), "--inference", "--machine", "v100"]) == 0
    assert "fits without moving anything" in capsys.readouterr().out


def test_a_budget_below_the_floor_has_a_table_and_an_error(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["estimate", "--checkpoint", str(checkpoint), "--inference", "--machine", "v100", "--budget", "1MiB"]
    assert main(line) == 2
    captured = capsys.readouterr()
    assert "does not fit" in captured.out
    rows = [" ".join(row.split()) for row in captured.out.splitlines()]
    # The least that would help, and whether each change is enough by itself.
    assert f"would fit {format_bytes(2**20 + CACHE_BYTES)}: a larger budget" in rows
    assert f"would fit {format_bytes((2**20 + CACHE_BYTES) // 2)}: half as many bits for every weight" in rows
    assert "would fit 1.00 MiB: one text of fewer tokens" in rows
    assert "the operator of layers." in captured.err
    assert main([*line[:-1], "100KiB"]) == 2
    table = capsys.readouterr().out
    assert "not enough alone" in table
    assert "half as many bits" in table


def test_a_model_by_name_generates(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--size", "layers=2", "--size", "width=64", "--size", "heads=4", "--size", "kv_heads=2"]
    line = ["--model", "llama", *sizes, "--size", "vocab=100", "--size", "hidden=128", "--inference"]
    wide = told(capsys, *line, "--machine", "v100", "--tokens", "100")
    half = told(capsys, *line, "--machine", "v100", "--tokens", "100", "--dtype", "bfloat16")
    assert wide["cache_bytes"] == 2 * 2 * 2 * 16 * 4 * 100
    assert half["weights_bytes"] * 2 == wide["weights_bytes"]
    assert half["cache_bytes"] * 2 == wide["cache_bytes"]


def test_a_checkpoint_of_a_known_model_is_estimated_for_training(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = told(capsys, "--checkpoint", str(checkpoint), "--machine", "v100")
    by_config = told(capsys, "--hf-config", str(checkpoint / "config.json"), "--machine", "v100")
    assert answer["parts"] == by_config["parts"]


def test_wrong_lines_are_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, reason in (
        (["--inference"], "--inference needs --model"),
        (["--checkpoint", str(checkpoint), "--model", "gpt2"], "already names a model"),
        (["--checkpoint", str(checkpoint), "--inference", "--tokens", "0"], "--tokens 0"),
        (["--checkpoint", str(checkpoint / "none"), "--inference"], "holds no safetensors file"),
    ):
        assert main(["estimate", *line, "--machine", "v100"]) == 2
        assert reason in capsys.readouterr().err


def test_what_is_read_shrinks_with_the_budget_and_time_is_the_longer_of_the_two() -> None:
    weights = [Weight(name=str(index), count=100, nbytes=400) for index in range(10)]
    inference = Inference(weights=weights, cache_bytes_per_token=1, batch=2, tokens=100)
    link = Link(write_bytes_per_s=1e3, read_bytes_per_s=1e3)
    slow = Machine(name="m", links={"spill": link}, flops_per_s=1e3, memory_bytes_per_s=1e9)
    assert inference.peak_bytes == 4200
    small, large = (served(inference, slow, link, budget_bytes=budget) for budget in (1400, 2400))
    assert small is not None
    assert large is not None
    assert small.read_bytes - large.read_bytes == 1000
    assert large.compute_s == 2 * 2 * 1000 / 1e3
    assert large.word_s == max(large.read_s, large.compute_s)
    whole = served(inference, slow, link, budget_bytes=4200)
    assert whole is not None
    assert whole.read_bytes == 0
    assert served(inference, slow, link, budget_bytes=500) is None


def test_a_cache_that_does_not_fit_is_read_and_written_for_every_word() -> None:
    weights = [Weight(name=str(index), count=100, nbytes=400) for index in range(10)]
    link = Link(write_bytes_per_s=1e3, read_bytes_per_s=2e3)
    machine = Machine(name="m", links={"spill": link})
    long = Inference(weights=weights, cache_bytes_per_token=1, batch=1, tokens=2000)
    found = served(long, machine, link, budget_bytes=1800)
    assert found is not None
    assert (found.kept_bytes, found.read_bytes) == (0, 4000)
    assert found.cache_read_bytes == found.cache_written_bytes == 2000 - (1800 - 2 * 400)
    assert found.word_s == pytest.approx((4000 + 1000) / 2e3 + 1000 / 1e3)
    assert found.written_bytes_per_day == pytest.approx(1000 * 86400 / found.word_s)
    assert found.read_bytes_per_day == pytest.approx(5000 * 86400 / found.word_s)
    short = Inference(weights=weights, cache_bytes_per_token=1, batch=1, tokens=100)
    fitting = served(short, machine, link, budget_bytes=1800)
    assert fitting is not None
    assert (fitting.cache_read_bytes, fitting.written_bytes_per_day) == (0, 0)


def test_the_table_tells_what_the_cache_moves(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--checkpoint", str(checkpoint), "--inference", "--machine", "cpu", "--budget", "4MiB", "--tokens", "8192"]
    answer = told(capsys, *line)
    assert answer["cache_written_bytes_per_word"] == answer["cache_bytes"] - 2 * 2**20
    assert answer["written_bytes_per_day"] > 0
    assert main(["estimate", *line]) == 0
    out = capsys.readouterr().out
    assert "of the cache" in out
    assert "written in a day" in out
    assert main(["estimate", *line[:-3], "1MiB", "--tokens", "8192"]) == 2
    assert "half as many bits" in capsys.readouterr().out, "the table comes with what would make it fit"


def test_what_a_config_says_counts_for_any_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    mixtral = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1}
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    answer = told(capsys, "--hf-config", str(tmp_path / "config.json"), "--inference", "--machine", "v100")
    assert answer["cache_bytes"] == CACHE_BYTES
    assert answer["model"] == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("config", "reason"), [("{oops", "config.json cannot be read"), ("[1]", "config.json holds a list")]
)
def test_a_config_that_is_none_is_refused(
    config: str, reason: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "config.json").write_text(config)
    assert main(["estimate", "--checkpoint", str(checkpoint), "--inference", "--machine", "v100"]) == 2
    assert reason in capsys.readouterr().err


def test_sizes_that_are_no_numbers_leave_the_cache_unknown(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": "two"}))
    assert told(capsys, "--checkpoint", str(checkpoint), "--inference", "--machine", "v100")["cache_bytes"] == 0


def test_a_checkpoint_without_tensors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert main(["estimate", "--checkpoint", str(tmp_path), "--inference", "--machine", "v100"]) == 2
    assert "holds no tensors" in capsys.readouterr().err
