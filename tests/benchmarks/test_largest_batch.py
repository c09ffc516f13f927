"""The search for the largest batch finds it, and says what refused the next one."""

from __future__ import annotations

import pytest

from benchmarks import largest_batch
from benchmarks.jobs import Answer, Job

JOB = Job(model="gpt_deep", contender="stock", spill="", batch=4)


def refusing_above(most: int, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Have every job with a batch above `most` refused; return the jobs that are launched."""
    launched: list[Job] = []

    def launch(job: Job) -> Answer:
        launched.append(job)
        return Answer(facts={}, failure=f"no room for {job.batch}" if job.batch > most else None)

    monkeypatch.setattr(largest_batch, "launch", launch)
    return launched


@pytest.mark.parametrize("times", [1, 2, 13, 14, 15, 27, 28, 31, 41, 56])
def test_the_largest_batch_is_found_to_a_sixteenth(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = refusing_above(4 * times + 3, monkeypatch)
    found, reason = largest_batch.largest(JOB, budget_bytes=1 << 20)
    refused = min(job.batch for job in launched if job.batch > 4 * times)
    assert found <= times < refused // 4 <= found + max(1, found // 16)
    assert reason.startswith("no room for ")
    assert {(job.contender, job.budget_bytes) for job in launched} == {("lowtide", 1 << 20)}


def test_the_search_ends_where_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = refusing_above(1 << 40, monkeypatch)
    times, reason = largest_batch.largest(JOB, budget_bytes=1 << 20)
    assert times >= largest_batch.GOAL
    assert reason == ""
    assert len(launched) < 20


def test_the_table_says_what_a_sample_costs_in_terms_of_stocks() -> None:
    found = {
        "gpt_deep": {
            "title": "GPT, batch 4",
            "threads": 1,
            "rounds": 1,
            "steps": 2,
            "budget_bytes": 100 << 20,
            "times": 20,
            "losses_identical": True,
            "contenders": {
                "stock": {"batch": 4, "peak_bytes": 100 << 20, "sample_s": 0.1, "moved_out_bytes": 0},
                "lowtide": {"batch": 80, "peak_bytes": 99 << 20, "sample_s": 0.11, "moved_out_bytes": 3 << 20},
            },
        }
    }
    lines = largest_batch.markdown(found).splitlines()
    assert lines[0].startswith(
        "GPT: in 100.0 MiB Lowtide trains 20 times stock's batch; at 14 times, losses are identical."
    )
    assert "| GPT | stock PyTorch | 4 | 100.0 MiB | 100.0 ms | 1.00x | none |" in lines
    assert "| GPT | Lowtide | 80 | 99.0 MiB | 110.0 ms | 1.10x | 3 MiB |" in lines
