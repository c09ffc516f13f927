"""What a report page shows, as one JSON document: figures exact, spans in whole nanoseconds and in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowtide import registry
from lowtide.core.columns import plain, table
from lowtide.core.machine import Machine
from lowtide.core.plan import Problem
from lowtide.core.timeline import Lane, Timeline
from lowtide.core.trace import Phase
from lowtide.core.units import format_seconds
from lowtide.errors import LowtideError
from lowtide.report.case import Settled
from lowtide.report.compare import Comparison, Outcome, Result
from lowtide.report.explain import Journey, Way, journeys, maker, module_of, needs
from lowtide.report.summary import summarize
from lowtide.report.thin import thin_memory, thin_spans

LANES = (Lane.COMPUTE, Lane.RECOMPUTE, Lane.STALL, Lane.OUT, Lane.IN)
# Spans and moments of all steps together: a page of a few policies stays below a megabyte.
_MOST_DETAILS = 20_000
_LEAST_DETAILS = 1_000
_MOST_JOURNEYS = 1_000
_SWAPPED = (Way.SWAPPED, Way.CARRIED, Way.UNUSED, Way.RELEASED)
_FIGURES = (
    "step_s",
    "compute_s",
    "recompute_s",
    "stall_s",
    "peak_bytes",
    "reserved_peak_bytes",
    "moved_out_bytes",
    "moved_in_bytes",
    "budget_bytes",
    "trials",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """What a page shows in detail: one problem and the steps of several policies on it, the first one on top."""

    problem: Problem
    steps: tuple[Settled, ...]


def page_of(comparison: Comparison, focus: Focus | None, *, note: str = "") -> dict[str, Any]:
    """Return everything a page shows; without a focus it has no timelines, and `note` says why."""
    names = dict.fromkeys(result.policy for result in comparison.results)
    return {
        "model": comparison.model,
        "note": note,
        "trace": {
            "operators": comparison.operators,
            "static_bytes": comparison.static_bytes,
            "peak_bytes": comparison.peak_bytes,
            "floor_bytes": comparison.floor_bytes,
            "floor_op": comparison.floor_op,
        },
        "results": [_result(result) for result in comparison.results],
        "machines": [_machine(machine) for machine in comparison.machines],
        "policies": [_policy(name) for name in names],
        "more_policies": len(set(registry.policy_names()) - set(names)),
        "focus": None if focus is None else _focus(focus),
    }


def _result(result: Result) -> dict[str, Any]:
    fields = {name: plain(value) for name, value in asdict(result).items()}
    return {**fields, "ran": isinstance(result, Outcome)}


def _policy(name: str) -> dict[str, Any]:
    """Return where a policy comes from, as far as it says."""
    try:
        policy = registry.policy(name)
    except LowtideError:  # a comparison may name a policy that is not installed here
        return {"name": name, "summary": "not installed here", "family": "", "runs": [], "paper": "", "filled_in": ""}
    about = policy.about
    return {
        "name": name,
        "summary": policy.summary,
        "family": about.family.value,
        "runs": [each.value for each in about.runs],
        "paper": about.paper,
        "filled_in": about.reconstructed,
    }


def _machine(machine: Machine) -> dict[str, Any]:
    from lowtide.estimate.presets import PRESETS

    preset = PRESETS.get(machine.name)
    stated = preset is not None and preset.machine == machine
    return {
        "name": machine.name,
        "title": preset.title if preset is not None and stated else "",
        "source": machine.source,
        "sources": dict(preset.sources) if preset is not None and stated else {},
        "flops_per_s": machine.flops_per_s,
        "memory_bytes_per_s": machine.memory_bytes_per_s,
        "capacity_bytes": machine.capacity_bytes,
        "links": [
            {"tier": tier, **{name: plain(value) for name, value in asdict(link).items()}}
            for tier, link in machine.links.items()
        ],
    }


def _focus(focus: Focus) -> dict[str, Any]:
    trace = focus.problem.trace
    names, name = table(op.name for op in trace.ops)
    modules, module = table(op.module for op in trace.ops)
    phases = list(Phase)
    most = max(_LEAST_DETAILS, _MOST_DETAILS // max(1, len(focus.steps)))
    return {
        "machine": focus.problem.machine.name,
        "budget_bytes": focus.problem.budget_bytes,
        "infinite_s": trace.duration_s,
        "lanes": [lane.value for lane in LANES],
        "phases": [phase.value for phase in phases],
        "ops": {
            "names": names,
            "modules": modules,
            "name": name,
            "module": module,
            "phase": [phases.index(op.phase) for op in trace.ops],
            "peak": [op.peak_bytes for op in trace.ops],
        },
        "steps": [_step(focus.problem, step, most=most) for step in focus.steps],
    }


def _step(problem: Problem, settled: Settled, *, most: int) -> dict[str, Any]:
    timeline, trace = settled.timeline, problem.trace
    summary = summarize(timeline, infinite_s=trace.duration_s)
    spans = thin_spans(timeline.spans, step_s=timeline.step_s, most=most)
    memory = thin_memory(timeline.memory, step_s=timeline.step_s, most=most)
    causes, cause = table(span.cause for span in spans)
    found = _journeys(problem, settled, timeline)
    return {
        "policy": timeline.policy,
        "figures": {name: plain(getattr(timeline, name)) for name in _FIGURES},
        "waits_s": summary.waits_s,
        "out_busy_s": summary.out_busy_s,
        "in_busy_s": summary.in_busy_s,
        "over_budget": settled.bound,
        "thinned": len(timeline.spans) - len(spans),
        "notes": list(timeline.notes),
        "causes": causes,
        "spans": {
            "lane": [LANES.index(span.lane) for span in spans],
            "start": [_ns(span.start_s) for span in spans],
            "end": [_ns(span.end_s) for span in spans],
            "op": [span.op for span in spans],
            "storage": [span.storage for span in spans],
            "nbytes": [span.nbytes for span in spans],
            "cause": cause,
        },
        "memory": {"at": [_ns(at_s) for at_s, _ in memory], "live": [live_bytes for _, live_bytes in memory]},
        "tiers": [_tier(tier, timeline, most=most) for tier in timeline.tiers],
        "journeys": _largest(found),
        "absences": len(found),
        # A tensor that is away over the end of the step has two absences in the timeline, and counts once.
        "swapped_tensors": len({each["storage"] for each in found if each["way"] in _SWAPPED}),
        "recomputed_tensors": len({each["storage"] for each in found if each["way"] == Way.REMADE}),
    }


def _tier(tier: str, timeline: Timeline, *, most: int) -> dict[str, Any]:
    held = thin_memory(timeline.tiers[tier], step_s=timeline.step_s, most=most // 4)  # a line behind the step's own
    return {"tier": tier, "at": [_ns(at_s) for at_s, _ in held], "held": [nbytes for _, nbytes in held]}


def _largest(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the journeys that a person would look for where there are too many: those waited for, and the largest."""
    order = sorted(range(len(found)), key=lambda index: (-found[index]["stall_s"], -found[index]["nbytes"], index))
    return [found[index] for index in sorted(order[:_MOST_JOURNEYS])]


def _journeys(problem: Problem, settled: Settled, timeline: Timeline) -> list[dict[str, Any]]:
    trace = problem.trace
    starts_s = {span.op: span.start_s for span in timeline.spans if span.lane is Lane.COMPUTE}
    needed, modules = needs(trace), module_of(trace)
    found = []
    for journey in journeys(trace, settled.plan, timeline):
        op = maker(trace, journey.storage)
        found.append(
            {
                "storage": journey.storage,
                "way": journey.way.value,
                "nbytes": journey.nbytes,
                "op": "" if op is None else op.name,
                "module": modules.get(journey.storage, ""),
                "kind": trace.storages[journey.storage].kind.value,
                "out": _ns(journey.out_s),
                "landed": _ns(journey.landed_s),
                "back": _ns(journey.back_s),
                "ready": _ns(journey.ready_s),
                "stall_s": journey.stall_s,
                "why": _why(journey, problem, starts_s, needed),
            }
        )
    return found


def _why(journey: Journey, problem: Problem, starts_s: Mapping[int, float], needed: Mapping[int, Sequence[int]]) -> str:
    """Return in a few words why a storage left, or came back as it did."""
    pressed = journey.cause_out == "pressure"
    if journey.way is Way.REMADE:
        if journey.ready_s is None or journey.back_s is None:
            return "discarded and never needed again"
        again = f"made again by {journey.remade_ops} operator{'s' if journey.remade_ops != 1 else ''}"
        link = problem.machine.links.get(problem.tier)
        copies_s = link.write_s(journey.nbytes) + link.read_s(journey.nbytes) if link is not None else 0.0
        reason = "memory ran out" if pressed else "planned"
        return f"{reason}: {again}, where two copies take {format_seconds(copies_s)}"
    if journey.way is Way.RELEASED:
        return "given up once more: the tier still had a copy, so nothing was written"
    if journey.way is Way.KEPT:
        return "wanted back while it was being copied, so it stayed"
    reason = "memory ran out" if pressed else "planned"
    if journey.way is Way.UNUSED:
        return f"{reason}: no operator needs it again"
    if journey.way is Way.CARRIED:
        return "away since the step before" if journey.out_s is None else f"{reason}: not needed until the next step"
    out_s, copies_s = journey.out_s or 0.0, _copies_s(journey)
    next_op = next((use for use in needed.get(journey.storage, ()) if starts_s.get(use, 0.0) > out_s), None)
    if next_op is None:
        return reason
    idle_s = starts_s[next_op] - out_s
    return f"{reason}: not needed for {format_seconds(idle_s)}, its copies take {format_seconds(copies_s)}"


def _copies_s(journey: Journey) -> float:
    wrote_s = (journey.landed_s or 0.0) - (journey.out_s or 0.0)
    read_s = (journey.ready_s or 0.0) - (journey.back_s or 0.0)
    return wrote_s + read_s


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)


def best_first(results: Sequence[Result]) -> list[Result]:
    """Return results with the fastest step first, and those that could not run last."""

    def order(result: Result) -> tuple[int, float, int, str]:
        if isinstance(result, Outcome):
            return (0, result.step_s, result.moved_out_bytes + result.moved_in_bytes, result.policy)
        return (1, 0.0, result.needed_bytes or 0, result.policy)

    return sorted(results, key=order)
