"""The benchmark of slow memory: what its jobs do, and what its tables say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import slow_memory_runs
from benchmarks.slow_memory_runs import Job, cost_table, jobs_of, slow_memory, table, work


def test_a_job_trains_on_slow_memory_and_computes_what_stock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"gpt": {"batch": 2, "layers": 1, "width": 64, "heads": 2, "tokens": 32, "vocab": 512}}
    monkeypatch.setattr(slow_memory_runs, "MODELS", tiny)
    stock = Job(model="gpt", steps=2, warmup=2, threads=1, spill=str(tmp_path))
    whole = work(replace(stock, policy="keep_all", budget_bytes=1 << 30))
    slow = work(replace(stock, policy="first_touch", budget_bytes=whole.peak_bytes // 3, scale=0.1))
    assert whole.digest == slow.digest == work(stock).digest
    assert slow.stats is not None
    assert slow.stats["in_place_ops"] > 0
    assert slow.stats["slow_s"] > 0
    assert slow.predicted_s > slow.recorded_s > 0


@pytest.mark.parametrize(
    ("what", "factor", "field", "times"),
    [
        ("read", 2.0, "read_bytes_per_s", 2.0),
        ("latency", 10.0, "latency_s", 10.0),
        ("cache", 8.0, "read_bytes_per_s", 1.0),
    ],
)
def test_a_constant_is_varied_alone(what: str, factor: float, field: str, times: float) -> None:
    from lowtide.estimate import machine

    medium = slow_memory(Job(model="gpt", steps=1, warmup=0, scale=1.0, changed=(what, factor)))
    medium.close()
    before, after = machine("optane").links["spill"].access, medium.emulation.machine.links["spill"].access
    assert before is not None
    assert getattr(after, field) == times * getattr(before, field)
    assert replace(after, **{field: getattr(before, field)}) == before
    assert medium.emulation.cache_bytes == (8 * 2**20 if what == "cache" else 0)


def test_tables_have_a_row_for_each_contender_and_name_failures() -> None:
    row = {"model": "gpt", "share": "40%", "peak_bytes": 2**30}
    done = {"slowdown": 1.25, "predicted": 1.2, "decision_s": 0.5}
    rows = [row | done | {"contender": "deeptm"}, row | {"contender": "autotm", "failure": "no time"}]
    assert "| deeptm | 1.250 (1.200) | 0.5 s |" in table(rows)
    assert "| autotm | failed | 0.0 s |" in table(rows)
    assert "autotm gpt 40%: no time" in table(rows)
    # 100 + 0.4 * 4 + 2 against 100 + 4, for a quarter longer.
    assert "| deeptm | +24.5% |" in cost_table(rows, fast=4, slow=2, rest=100)
    # Where time ran out before a contender's turn, its cell says so, and the others stay in their columns.
    rows.append(row | done | {"contender": "autotm", "share": "60%"})
    assert "| deeptm | 1.250 (1.200) | - | 0.5 s |" in table(rows)
    assert "| deeptm | +24.5% | - |" in cost_table(rows, fast=4, slow=2, rest=100)


def test_every_policy_runs_at_every_share() -> None:
    import argparse

    options = argparse.Namespace(shares="0.2,0.4", policies="deeptm,auto", sweep=False)
    common = Job(model="", steps=1, warmup=1)
    found = dict(jobs_of("gpt", 1000, common, options))
    assert {name: job.budget_bytes for name, job in found.items()} == {
        "deeptm/20%": 200,
        "auto/20%": 200,
        "deeptm/40%": 400,
        "auto/40%": 400,
    }
