"""The benchmark of state larger than memory: its contenders compute what they should, and its lines say what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import state
from benchmarks.contenders import creation, open_session, train_step
from benchmarks.jobs import Answer, Job
from benchmarks.models import MODELS, Benchmark, LanguageModel, Sizes
from lowtide.errors import BudgetTooSmall
from lowtide.memory.native import load

MIB = 2**20


def tiny() -> Benchmark:
    """A GPT whose state is larger than its activations."""
    made = MODELS["gpt"](Sizes(vocabulary=512, scale=8))

    def build() -> LanguageModel:
        return LanguageModel(vocabulary=512, width=256, depth=4, heads=4, tokens=512, causal=True, dropout=0.0)

    return Benchmark(title="tiny", build=build, optimizer=made.optimizer, batch=made.batch, loss=made.loss)


def answer(*, step_s: float = 2.0, losses: tuple[float, ...] = (4.0, 2.0), **facts: Any) -> Answer:
    moved = {"moved_in_bytes_per_step": 60, "moved_out_bytes_per_step": 40}
    told = [loss.hex() for loss in losses]
    return Answer(facts={"step_s": [step_s], "rss_peak_bytes": 1, "losses": told, **moved, **facts})


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: dict[str, Answer], *arguments: str) -> Any:
    """Run the script with the workers' answers given; return its exit code, its file and the jobs that it started."""
    jobs: list[Job] = []

    def launched(job: Job, *, prefix: object) -> Answer:
        jobs.append(job)
        return answers[job.contender]

    monkeypatch.setattr(state, "launch", launched)
    out = tmp_path / "state.json"
    code = state.main(["--rounds", "1", "--out", str(out), "--spill", str(tmp_path), *arguments])
    return code, json.loads(out.read_text()), jobs


def test_a_model_created_inside_its_budget_trains_as_stock_does(tmp_path: Path) -> None:
    load()
    benchmark = tiny()
    stock = Job(model="tiny", contender="stock", spill=str(tmp_path))
    state_bytes = state._state_bytes(benchmark)
    ours = Job(model="tiny", contender="lowtide", spill=str(tmp_path), budget_bytes=40 * MIB, created_inside=True)
    losses = []
    for job in (stock, ours):
        torch.manual_seed(1)
        with creation(job):
            module = benchmark.build()
        optimizer = benchmark.optimizer(module)
        found = []
        with open_session(job, module, optimizer) as session:
            for index in range(3):
                batch = benchmark.batch(torch.Generator().manual_seed(index))
                with session.step():
                    loss = session.train_step(benchmark, module, optimizer, batch)
                found.append(float(loss).hex())
            facts = session.facts()
        losses.append(found)
        del module, optimizer, batch, loss
    assert losses[0] == losses[1]
    assert facts["peak_reserved_bytes"] <= 40 * MIB < state_bytes
    assert facts["least_traffic_bytes"] > 0


def test_the_budget_holds_while_the_model_is_created(tmp_path: Path) -> None:
    load()
    job = Job(model="tiny", contender="lowtide", spill=str(tmp_path), budget_bytes=MIB, created_inside=True)
    with pytest.raises(BudgetTooSmall), creation(job):
        torch.ones(MIB)


def test_without_the_flag_the_model_is_created_outside_of_lowtide(tmp_path: Path) -> None:
    with creation(Job(model="tiny", contender="lowtide", spill=str(tmp_path), budget_bytes=1)):
        torch.ones(MIB)


def test_the_state_is_what_training_leaves_in_memory() -> None:
    benchmark = tiny()
    module = benchmark.build()
    optimizer = benchmark.optimizer(module)
    train_step(benchmark, module, optimizer, benchmark.batch(torch.Generator()))
    moments = [kept.nbytes for one in optimizer.state.values() for kept in one.values()]
    assert state._state_bytes(benchmark) == sum(moments) + 2 * sum(one.nbytes for one in module.parameters())


def test_the_large_model_has_a_billion_parameters_and_16_bytes_of_state_for_each() -> None:
    with torch.device("meta"):
        count = sum(one.numel() for one in MODELS["gpt_1b"](Sizes()).build().parameters())
    assert 1.0e9 < count < 1.1e9
    assert state._state_bytes(MODELS["gpt_1b"](Sizes())) == pytest.approx(16 * count, rel=1e-6)


@pytest.mark.parametrize(("text", "nbytes"), [("25%", 250), ("12.5%", 125), ("2KiB", 2048)])
def test_a_budget_is_bytes_or_a_share_of_the_state(text: str, nbytes: int) -> None:
    assert state._budget_bytes(text, state_bytes=1000) == nbytes


def test_every_budget_is_trained_inside_and_lines_hold_traffic_beside_the_least(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = {"stock": answer(), "lowtide": answer(step_s=3.0, least_traffic_bytes=80)}
    code, found, jobs = run(monkeypatch, tmp_path, answers, "--model", "gpt", "--rivals", "--budgets", "50%", "1GiB")
    assert code == 0
    assert [(job.contender, job.budget_bytes, job.created_inside) for job in jobs] == [
        ("stock", None, False),
        ("lowtide", found["state_bytes"] // 2, True),
        ("lowtide", 2**30, True),
    ]
    line = found["lines"]["lowtide 50%"]
    assert (line["ratio_to_stock"], line["share_of_least_traffic"], line["losses_identical"]) == (1.5, 1.25, True)


def test_other_losses_of_lowtide_are_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = answer(losses=(4.0, 2.5))
    code, found, _ = run(monkeypatch, tmp_path, {"stock": answer(), "lowtide": wrong}, "--model", "gpt", "--rivals")
    assert (code, found["lines"]["lowtide 2GiB"]["losses_identical"]) == (1, False)


def test_a_process_that_was_killed_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed = Answer(facts={}, failure="killed by signal 9")
    code, found, _ = run(monkeypatch, tmp_path, {"stock": answer(), "lowtide": killed}, "--model", "gpt", "--rivals")
    assert (code, found["lines"]["lowtide 2GiB"]) == (1, {"failure": "killed by signal 9"})


def test_where_stock_does_not_fit_nothing_is_compared_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed = Answer(facts={}, failure="killed by signal 9")
    code, found, _ = run(monkeypatch, tmp_path, {"stock": killed, "lowtide": answer()}, "--model", "gpt", "--rivals")
    line = found["lines"]["lowtide 2GiB"]
    assert (code, line["step_s"], line["ratio_to_stock"], line["losses_identical"]) == (1, 2.0, None, None)
