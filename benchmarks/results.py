"""From single runs to the numbers that are published: medians, ratios within a round, and the machine's facts."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.jobs import Answer

RESULTS_VERSION = 1
_PLAN_FACTS = (
    "planned_swaps",
    "planned_encoded",
    "planned_recomputes",
    "recompute_s",
    "last_step_stall_s",
    "recorded_s",
)


@dataclass(slots=True, kw_only=True)
class Entrant:
    """A contender in one model's comparison, with one answer for each round.

    `key` tells entrants apart, such as "lowtide@0.6". `limit_of`: the entrant whose resident set is this one's limit.
    """

    key: str
    contender: str
    share: float | None = None
    budget_bytes: int | None = None
    limit_of: str | None = None
    policy: str = "auto"
    skipped: str | None = None
    counted: dict[str, Any] = field(default_factory=dict)
    answers: list[Answer | None] = field(default_factory=list)
    limits_bytes: list[int] = field(default_factory=list)


def summary(entrant: Entrant, stock: Entrant) -> dict[str, Any]:
    """Return an entrant's line: medians over all rounds, and the median of its ratios to stock in the same round."""
    line: dict[str, Any] = {"key": entrant.key, "contender": entrant.contender, "share": entrant.share}
    if entrant.budget_bytes is not None:
        line["budget_bytes"] = entrant.budget_bytes
    if entrant.policy != "auto":
        line["policy"] = entrant.policy
    if entrant.skipped is not None:
        return {**line, "skipped": entrant.skipped}
    good = [answer.facts for answer in entrant.answers if answer is not None and answer.failure is None]
    failures = sorted({answer.failure for answer in entrant.answers if answer is not None and answer.failure})
    if failures:
        line["failures"] = failures
    if not good:
        return line
    ratios, same = _against_stock(entrant, stock)
    line |= {
        "step_s": statistics.median(s for facts in good for s in facts["step_s"]),
        "ratio_to_stock": statistics.median(ratios) if ratios else None,
        "round_ratios_to_stock": ratios,
        "losses_identical": all(same) if same else None,
        "rss_peak_bytes": max(facts["rss_peak_bytes"] for facts in good),
        "moved_out_bytes_per_step": statistics.median(facts["moved_out_bytes_per_step"] for facts in good),
        "moved_in_bytes_per_step": statistics.median(facts["moved_in_bytes_per_step"] for facts in good),
        "moved_bytes_total": sum(f["moved_out_bytes_total"] + f["moved_in_bytes_total"] for f in good),
        "round_step_s": [facts["step_s"] for facts in good],
    }
    if "planned_swaps" in good[-1]:
        line["plan"] = {name: good[-1][name] for name in _PLAN_FACTS}
    counted = [facts for facts in (entrant.counted, *good) if "peak_bytes" in facts]
    if counted:
        line["peak_live_bytes"] = max(facts["peak_bytes"] for facts in counted)
        line["peak_reserved_bytes"] = max(facts["peak_reserved_bytes"] for facts in counted)
    if entrant.limits_bytes:
        line["limit_bytes"] = statistics.median(entrant.limits_bytes)
    return line


def _against_stock(entrant: Entrant, stock: Entrant) -> tuple[list[float], list[bool]]:
    ratios, same = [], []
    for mine, theirs in zip(entrant.answers, stock.answers, strict=False):
        if mine is None or theirs is None or mine.failure or theirs.failure:
            continue
        ratios.append(statistics.median(mine.facts["step_s"]) / statistics.median(theirs.facts["step_s"]))
        same.append(mine.facts["losses"] == theirs.facts["losses"])
    return ratios, same


def environment(*, torch_version: str, threads: int, spill: Path) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers; no host names and no paths."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "kernel": platform.release().split("-")[0],
        "spill_filesystem": _filesystem(spill),
        "python": platform.python_version(),
        "torch": torch_version,
        "threads": threads,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _filesystem(path: Path) -> str:
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    best, kind = "", "unknown"
    for line in mounts.read_text().splitlines():
        _, point, name, *_ = line.split()
        if path.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, name
    return kind
