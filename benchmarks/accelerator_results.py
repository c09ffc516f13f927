"""From single runs on the simulated accelerator to the numbers that are published, and the goals they are held to."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.accelerator_jobs import Link
from benchmarks.jobs import Answer

# What the traffic may cost; see docs/benchmarks-accelerator.md.
LEAST_HIDDEN = 0.85
MOST_RATIO = 1.10
MOST_OVER_BOUND = 1.10
OFFLOAD_RIVALS = ("save_on_cpu", "one_block_ahead")
# It loses strides: what was saved as a view or channels-last comes back contiguous, and other kernels round otherwise.
_MAY_DIFFER = ("save_on_cpu",)


@dataclass(slots=True, kw_only=True)
class Entrant:
    """A contender on one model and one link, with one answer for each round."""

    key: str
    contender: str
    policy: str = "auto"
    budget_bytes: int | None = None
    answers: list[Answer] = field(default_factory=list)


def bound_s(phases_s: dict[str, float], asked_bytes: dict[str, dict[str, int]], link: Link) -> float:
    """Return the least time of a step: in each phase compute or the link, whichever takes longer.

    `phases_s` is what an unmanaged step takes. The directions work side by side; a phase that moves nothing takes its
    compute time.
    """
    total_s = 0.0
    for phase, compute_s in phases_s.items():
        asked = asked_bytes.get(phase, {"out": 0, "in": 0})
        out_s = asked["out"] / link.d2h_bytes_per_s if link.d2h_bytes_per_s else 0.0
        in_s = asked["in"] / link.h2d_bytes_per_s if link.h2d_bytes_per_s else 0.0
        total_s += max(compute_s, out_s, in_s)
    return total_s


def phases_of(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median time of each phase."""
    return {phase: statistics.median(step["phases_s"][phase] for step in steps) for phase in steps[0]["phases_s"]}


def asked_of(steps: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the median bytes asked to move in each phase and direction."""
    return {
        phase: {way: int(statistics.median(step["asked_bytes"][phase][way] for step in steps)) for way in ways}
        for phase, ways in steps[0]["asked_bytes"].items()
    }


def summary(entrant: Entrant, unmanaged: Entrant, link: Link) -> dict[str, Any]:
    """Return an entrant's line: medians over all rounds; ratios are taken within a round."""
    line: dict[str, Any] = {"key": entrant.key, "contender": entrant.contender, "policy": entrant.policy}
    if entrant.budget_bytes is not None:
        line["budget_bytes"] = entrant.budget_bytes
    failures = sorted({answer.failure for answer in entrant.answers if answer.failure})
    if failures:
        line["failures"] = failures
    rounds = [_round(mine, base, link) for mine, base in zip(entrant.answers, unmanaged.answers, strict=False)]
    good = [one for one in rounds if one is not None]
    if not good:
        return line
    steps = [step for one in good for step in one["steps"]]
    copy_s = sum(step["copy_s"] for step in steps)
    line |= {
        "step_s": statistics.median(step["step_s"] for step in steps),
        "compute_s": statistics.median(step["compute_s"] for step in steps),
        "ratio_to_unmanaged": statistics.median(one["ratio"] for one in good),
        "hidden_share": sum(step["hidden_copy_s"] for step in steps) / copy_s if copy_s else None,
        "bound_s": statistics.median(one["bound_s"] for one in good),
        "ratio_to_bound": statistics.median(one["ratio_to_bound"] for one in good),
        "d2h_bytes_per_step": statistics.median(step["d2h_bytes"] for step in steps),
        "h2d_bytes_per_step": statistics.median(step["h2d_bytes"] for step in steps),
        "asked_bytes": asked_of(steps),
        "phases_s": phases_of(steps),
        "peak_bytes": max(one["peak_bytes"] for one in good),
        "losses_identical": all(one["same"] for one in good),
        "rounds": good,
    }
    return line


def _round(mine: Answer, unmanaged: Answer, link: Link) -> dict[str, Any] | None:
    if mine.failure or unmanaged.failure:
        return None
    steps, base = mine.facts["steps"], unmanaged.facts["steps"]
    step_s, base_s = (statistics.median(step["step_s"] for step in side) for side in (steps, base))
    least_s = bound_s(phases_of(base), asked_of(steps), link)
    told = ("stall_s", "predicted_step_s", "predicted_stall_s", "recorded_s", "peak_reserved_bytes", "host_peak_bytes")
    return {
        "ratio": step_s / base_s,
        "bound_s": least_s,
        "ratio_to_bound": step_s / least_s,
        # Lowtide's own count includes the first steps, which are reactive.
        "peak_bytes": max(*(step["peak_bytes"] for step in steps), mine.facts.get("peak_bytes", 0)),
        "same": mine.facts["losses"] == unmanaged.facts["losses"],
        "steps": steps,
        "warmup_step_s": [step["step_s"] for step in mine.facts["warmup"]],
        **{name: mine.facts[name] for name in told if name in mine.facts},
    }


def broken_promises(lines: list[dict[str, Any]]) -> list[str]:
    """Return what must not happen and did: other losses than the unmanaged training's, or a budget that was passed."""
    found = []
    for line in lines:
        if line.get("losses_identical") is False and line["contender"] not in _MAY_DIFFER:
            found.append(f"{line['key']} computed other losses than the unmanaged training")
        used = max((one.get("peak_reserved_bytes", 0) for one in line.get("rounds", [])), default=0)
        if used > line.get("budget_bytes", used):
            found.append(f"{line['key']} used {used} of {line['budget_bytes']} bytes")
    return found


def goals(lines: list[dict[str, Any]], *, hides: bool) -> list[tuple[str, bool]]:
    """Return each goal with whether it is met; `hides`: the link could hide the traffic, else it is the bottleneck."""
    by_key = {line["key"]: line for line in lines if "step_s" in line}
    ours = by_key.get("lowtide")
    if ours is None:
        return [("Lowtide runs", False)]
    if hides:
        hidden, ratio = ours["hidden_share"], ours["ratio_to_unmanaged"]
        share = "nothing was copied" if hidden is None else f"{hidden:.0%} of copy time hidden"
        return [
            (f"{share} (goal: at least {LEAST_HIDDEN:.0%})", hidden is None or hidden >= LEAST_HIDDEN),
            (f"{ratio:.2f}x unmanaged (goal: at most {MOST_RATIO:.2f}x)", ratio <= MOST_RATIO),
        ]
    ratio = ours["ratio_to_bound"]
    found = [(f"{ratio:.2f}x the bound (goal: at most {MOST_OVER_BOUND:.2f}x)", ratio <= MOST_OVER_BOUND)]
    for rival in OFFLOAD_RIVALS:
        if rival in by_key:
            faster = ours["step_s"] < by_key[rival]["step_s"]
            found.append((f"{ours['step_s']:.2f} s against {by_key[rival]['step_s']:.2f} s of `{rival}`", faster))
    return found
