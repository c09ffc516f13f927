"""The benchmark on the simulated accelerator: its arithmetic, its page, and that its rival computes what it should."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.accelerator_jobs import Link
from benchmarks.accelerator_results import Entrant, bound_s, broken_promises, goals, summary
from benchmarks.accelerator_table import SCRIPT, markdown
from benchmarks.jobs import Answer
from benchmarks.models import Chain, LanguageModel
from benchmarks.pages import END, begin_of, write_page
from lowtide.errors import BadArgument, NativeUnavailable

MIB = 2**20
LINK = Link(d2h_bytes_per_s=100 * MIB, h2d_bytes_per_s=50 * MIB)
PHASES = {"forward": 1.0, "backward": 2.0, "update": 0.25}


def asked(*, out: int, back: int) -> dict[str, dict[str, int]]:
    return {"forward": {"out": out * MIB, "in": 0}, "backward": {"out": 0, "in": back * MIB}}


# ---- the arithmetic ----


def test_the_bound_is_compute_where_the_link_is_faster() -> None:
    assert bound_s(PHASES, asked(out=60, back=60), LINK) == pytest.approx(3.25)


def test_the_bound_is_the_link_where_that_is_slower_in_each_phase_by_itself() -> None:
    assert bound_s(PHASES, asked(out=150, back=60), LINK) == pytest.approx(1.5 + 2.0 + 0.25)
    assert bound_s(PHASES, asked(out=60, back=150), LINK) == pytest.approx(1.0 + 3.0 + 0.25)


def test_the_two_directions_of_the_link_work_side_by_side() -> None:
    both = {"forward": {"out": 0, "in": 0}, "backward": {"out": 250 * MIB, "in": 150 * MIB}}
    assert bound_s(PHASES, both, LINK) == pytest.approx(1.0 + 3.0 + 0.25)


def test_a_link_as_fast_as_memory_bounds_nothing() -> None:
    assert bound_s(PHASES, asked(out=10**6, back=10**6), Link()) == pytest.approx(3.25)


def answer(
    *, step_s: float, hidden_s: float = 0.0, copy_s: float = 0.0, peak: int = 500, loss: str = "0x1", moved: int = 0
) -> Answer:
    step = {
        "step_s": step_s,
        "phases_s": PHASES,
        "asked_bytes": asked(out=moved, back=moved),
        "static_bytes": 100 * MIB,
        "peak_bytes": peak * MIB,
        "compute_s": 3.0,
        "copy_s": copy_s,
        "hidden_copy_s": hidden_s,
        "d2h_bytes": moved * MIB,
        "h2d_bytes": moved * MIB,
    }
    return Answer(facts={"steps": [step, step], "warmup": [step], "losses": [loss]})


def lines(*entrants: Entrant) -> list[dict[str, Any]]:
    return [summary(entrant, entrants[0], LINK) for entrant in entrants]


def entrant(key: str, *answers: Answer, budget: int | None = None) -> Entrant:
    nbytes = None if budget is None else budget * MIB
    return Entrant(key=key, contender=key, budget_bytes=nbytes, answers=list(answers))


def test_ratios_are_taken_within_a_round() -> None:
    """The second round met a machine half as fast: the ratios say that nothing changed."""
    base = entrant("unmanaged", answer(step_s=3.25), answer(step_s=6.5))
    ours = entrant("lowtide", answer(step_s=3.575, moved=10), answer(step_s=7.15, moved=10))
    assert lines(base, ours)[1]["ratio_to_unmanaged"] == pytest.approx(1.1)


def test_the_hidden_share_is_of_all_copy_time() -> None:
    base = entrant("unmanaged", answer(step_s=3.0), answer(step_s=3.0))
    ours = entrant(
        "lowtide", answer(step_s=3.0, copy_s=3.0, hidden_s=3.0), answer(step_s=3.0, copy_s=1.0, hidden_s=0.0)
    )
    assert lines(base, ours)[1]["hidden_share"] == pytest.approx(0.75)
    assert lines(base, ours)[0]["hidden_share"] is None


def test_a_round_in_which_one_side_failed_is_left_out_and_told() -> None:
    base = entrant("unmanaged", answer(step_s=1.0), Answer(facts={}, failure="killed by signal 9"))
    ours = entrant("lowtide", answer(step_s=2.0), answer(step_s=99.0))
    unmanaged, managed = lines(base, ours)
    assert managed["ratio_to_unmanaged"] == pytest.approx(2.0)
    assert unmanaged["failures"] == ["killed by signal 9"]


def test_other_losses_and_a_passed_budget_are_broken_promises() -> None:
    base = entrant("unmanaged", answer(step_s=1.0))
    ours = entrant("lowtide", answer(step_s=1.0, loss="0x2"), budget=400)
    ours.answers[0].facts["peak_reserved_bytes"] = 401 * MIB
    found = broken_promises(lines(base, ours))
    assert len(found) == 2
    assert "other losses" in found[0]
    assert str(401 * MIB) in found[1]
    assert not broken_promises(lines(base, entrant("lowtide", answer(step_s=1.0), budget=400)))


def test_only_the_rival_that_loses_strides_may_compute_other_losses() -> None:
    base = entrant("unmanaged", answer(step_s=1.0))
    assert not broken_promises(lines(base, entrant("save_on_cpu", answer(step_s=1.0, loss="0x2"))))
    for exact in ("one_block_ahead", "checkpoint", "lowtide"):
        assert broken_promises(lines(base, entrant(exact, answer(step_s=1.0, loss="0x2"))))


def test_goals_on_a_link_that_can_hide_the_traffic() -> None:
    base = entrant("unmanaged", answer(step_s=3.25))
    good = entrant("lowtide", answer(step_s=3.5, copy_s=1.0, hidden_s=0.9, moved=10))
    slow = entrant("lowtide", answer(step_s=3.6, copy_s=1.0, hidden_s=0.8, moved=10))
    assert [met for _, met in goals(lines(base, good), hides=True)] == [True, True]
    assert [met for _, met in goals(lines(base, slow), hides=True)] == [False, False]
    alone = entrant("lowtide", answer(step_s=3.6))  # it ran operators again instead
    assert [met for _, met in goals(lines(base, alone), hides=True)] == [True, False]


def test_goals_where_the_link_is_the_bottleneck() -> None:
    base = entrant("unmanaged", answer(step_s=3.25))
    rivals = [entrant("save_on_cpu", answer(step_s=9.0)), entrant("one_block_ahead", answer(step_s=5.0))]
    good = entrant("lowtide", answer(step_s=4.9, moved=150))
    slow = entrant("lowtide", answer(step_s=5.3, moved=150))
    assert [met for _, met in goals(lines(base, good, *rivals), hides=False)] == [True, True, True]
    assert [met for _, met in goals(lines(base, slow, *rivals), hides=False)] == [False, True, False]
    assert [met for _, met in goals(lines(base), hides=False)] == [False]


# ---- the page ----


def results() -> dict[str, Any]:
    base = entrant("unmanaged", answer(step_s=3.25))
    ours = entrant("lowtide", answer(step_s=3.5, copy_s=1.0, hidden_s=0.9, peak=320, moved=60), budget=325)
    rival = entrant("save_on_cpu", Answer(facts={}, failure="OutOfMemoryError: no"))
    facts = {
        "title": "a model",
        "parameters": 1e6,
        "static_bytes": 100 * MIB,
        "peak_bytes": 600 * MIB,
        "budget_bytes": 325 * MIB,
        "floor_bytes": 200 * MIB,
        "links": {
            "hiding": {"d2h_bytes_per_s": 1e8, "h2d_bytes_per_s": 5e7, "contenders": lines(base, ours, rival)},
        },
    }
    machine = dict.fromkeys(("cpu", "cores", "system", "kernel", "python", "torch", "threads"), "x")
    settings = {"rounds": 2, "steps": 2, "warmup": 1, "share": 0.45}
    return {"settings": settings, "environment": machine, "models": {"model": facts}}


def test_the_table_holds_every_figure_and_says_what_failed() -> None:
    text = markdown(results())
    (row,) = [line for line in text.splitlines() if line.startswith("| Lowtide |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == ["3.50 s", "1.08x", "90%", "3.25 s", "1.08x", "320 MiB", "60 MiB + 60 MiB", "yes"]
    assert "- met: 90% of copy time hidden (goal: at least 85%)" in text
    assert "- `save_on_cpu(pin_memory=True)` failed: OutOfMemoryError: no" in text


def test_the_page_keeps_what_is_around_the_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin_of(SCRIPT)}\nold\n{END}\nafter\n")
    write_page(markdown(results()), page, script=SCRIPT)
    write_page(markdown(results()), page, script=SCRIPT)
    text = page.read_text()
    assert text.startswith(f"before\n{begin_of(SCRIPT)}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert text.count("### a model") == 1


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match=r"page\.md lacks the marks"):
        write_page(markdown(results()), page, script=SCRIPT)
    assert page.read_text() == "no marks\n"


# ---- the rival ----


@pytest.fixture
def sim() -> Iterator[Any]:
    """The emulated device: late at random, new memory filled with NaN, races watched."""
    from tests.emulator.devices import fresh

    gc.collect()
    try:
        emulator = fresh(capacity=1 << 30, jitter_s=1e-4, seed=3, poison=True, races=True)
    except (NativeUnavailable, BadArgument) as error:
        pytest.skip(f"no device to test on: {error}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield emulator
    torch.set_num_threads(threads)
    torch.accelerator.synchronize()
    fresh()


def language_model() -> nn.Module:
    return LanguageModel(vocabulary=64, width=32, depth=4, heads=2, tokens=32, causal=True, dropout=0.0)


def convolutions() -> nn.Module:
    def stage(before: int, after: int) -> nn.Module:
        parts = [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        return nn.Sequential(*parts, nn.Conv2d(after, after, 3, padding=1), nn.ReLU(inplace=True))

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    return Chain(stage(3, 8), stage(8, 8), stage(8, 8), stage(8, 16), head)


def batch_for(module: nn.Module) -> Tensor:
    source = torch.Generator().manual_seed(5)
    if isinstance(module, LanguageModel):
        return torch.randint(0, 64, (4, 32), generator=source).to("sim")
    return torch.randn(4, 3, 32, 32, generator=source).to("sim")


@pytest.mark.parametrize("build", [language_model, convolutions])
def test_the_one_block_ahead_rival_is_exact_free_of_races_and_saves_memory(build: Any, sim: Any) -> None:
    from benchmarks.accelerator_offload import OneBlockAhead

    def gradients(*, offload: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        module = build().to("sim")
        found: list[Tensor] = []
        with OneBlockAhead(module) as ahead:
            for _ in range(3):
                batch = batch_for(module)
                torch.accelerator.synchronize()
                torch.accelerator.reset_peak_memory_stats()
                if offload:
                    with ahead.step():
                        module(batch).square().sum().backward()
                else:
                    module(batch).square().sum().backward()
                found += [parameter.grad.cpu() for parameter in module.parameters() if parameter.grad is not None]
                module.zero_grad()
            if offload:
                assert 0 < ahead.back_bytes == ahead.out_bytes, "what leaves is needed again"
                assert ahead.pinned_bytes * 2 < ahead.out_bytes, "buffers are used again in the next step"
        return found, torch.accelerator.max_memory_allocated()

    plain, plain_bytes = gradients(offload=False)
    offloaded, offloaded_bytes = gradients(offload=True)
    assert len(plain) == len(offloaded) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    assert offloaded_bytes < plain_bytes
    assert not sim.races()
