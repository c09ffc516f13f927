"""vDNN: offload the inputs of layers, and wait for every transfer at the end of a layer (Rhu et al., MICRO 2016).

Symbols: X_n, the input of layer n; FWD(n) and BWD(n), its operators; a *step* is one BWD(n).

FWD: X_n leaves once its last reader is done, beside the layer that follows; the layer after that waits for the copy.
BWD: before BWD(n), the nearest layer below whose input is away and not yet on its way back is looked for, no further
than the next convolution; its input is fetched beside BWD(n), and the next step waits for it.

Which inputs leave: `conv` those of convolutions, `all` those of every layer but activations and softmax; that of the
last layer before the softmax never does. `dyn` takes the first of none, conv, all that fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lowtide.core.plan import Plan, Prediction, Problem, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.core.units import format_bytes
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.views.algorithms import Table, fastest, fastest_within, leanest, with_algorithms
from lowtide.plan.views.layers import Layer, LayerKind, crossing_gaps, layers_of, step_at

_STAYING = (LayerKind.ACTIVATION, LayerKind.LOSS)

Selection = Callable[[Trace, Sequence[Layer]], tuple[Gap, ...]]


def offload_none(trace: Trace, layers: Sequence[Layer]) -> tuple[Gap, ...]:  # noqa: ARG001 - a Selection
    """Return no gap."""
    return ()


def offload_conv(trace: Trace, layers: Sequence[Layer]) -> tuple[Gap, ...]:
    """Return the gaps of the inputs of convolutions."""
    return _inputs_of(trace, layers, [layer for layer in layers if layer.kind is LayerKind.CONV])


def offload_all(trace: Trace, layers: Sequence[Layer]) -> tuple[Gap, ...]:
    """Return the gaps of the inputs of all layers but activations and softmax."""
    return _inputs_of(trace, layers, [layer for layer in layers if layer.kind not in _STAYING])


def _inputs_of(trace: Trace, layers: Sequence[Layer], chosen: Sequence[Layer]) -> tuple[Gap, ...]:
    last = next((layer for layer in reversed(layers) if layer.kind is not LayerKind.LOSS), None)
    staying = set(last.inputs) if last is not None else set()
    gaps = crossing_gaps(trace)
    inputs = {storage for layer in chosen for storage in layer.inputs} - staying
    return tuple(gaps[storage] for storage in sorted(inputs) if storage in gaps)


def transfers(problem: Problem, layers: Sequence[Layer], gaps: Sequence[Gap], *, synchronous: bool) -> tuple[Swap, ...]:
    """Return the swaps of `gaps` with vDNN's prefetches and, if `synchronous`, its waits at the ends of layers."""
    fetched = _prefetches(layers, gaps)
    ends = ends_of_layers(layers)
    swaps = []
    for gap in gaps:
        fetch_op, arrived_op = fetched.get(gap, (gap.before_op, gap.before_op))
        if fetch_op <= gap.after_op:
            fetch_op = min(gap.after_op + 1, gap.before_op)
            arrived_op = max(arrived_op, fetch_op)
        swap = Swap(gap=gap, fetch_op=fetch_op, tier=problem.tier)
        if synchronous:
            swap = replace(swap, landed_op=landing(ends, gap), arrived_op=arrived_op)
        swaps.append(swap)
    return that_fit(problem, swaps)


def landing(ends: Sequence[int], gap: Gap) -> int:
    """Return the operator at which the first layer that begins after the copy is over.

    A copy that begins in the middle of a layer overlaps with the rest of it and with the next one: vDNN's copies begin
    with a layer, but a storage can only leave here once its last reader is done.
    """
    position = bisect_left(ends, gap.after_op) + 1
    end = ends[position] if position < len(ends) else gap.before_op
    return min(max(end, gap.after_op + 1), gap.before_op)


def ends_of_layers(layers: Sequence[Layer]) -> list[int]:
    """Return where layers begin and end, in both passes; activations work in place and belong to the layer before."""
    forward = {
        layer.forward.start for layer in layers if layer.kind is not LayerKind.ACTIVATION or layer.forward.start == 0
    }
    stops = {layers[-1].forward.stop} if layers else set()
    return sorted(forward | stops | {layer.backward.start for layer in layers if layer.backward})


def _prefetches(layers: Sequence[Layer], gaps: Sequence[Gap]) -> dict[Gap, tuple[int, int]]:
    """Return, for each gap that is prefetched, the operators that start its read and that wait for it."""
    steps = sorted((layer.backward.start, layer.kind) for layer in layers if layer.backward)
    starts = [start for start, _ in steps]
    wanted: dict[int, list[Gap]] = {}
    for gap in gaps:
        wanted.setdefault(step_at(starts, gap.before_op), []).append(gap)
    away = sorted(position for position in wanted if position > 0)
    found: dict[Gap, tuple[int, int]] = {}
    taken = 0
    next_conv = _next_convs([kind for _, kind in steps])
    for position in range(len(steps) - 1):
        while taken < len(away) and away[taken] <= position:
            taken += 1
        if taken < len(away) and away[taken] <= next_conv[position]:
            for gap in wanted[away[taken]]:
                found[gap] = (starts[position], min(starts[position + 1], gap.before_op))
            taken += 1
    return found


def _next_convs(kinds: Sequence[LayerKind]) -> list[int]:
    """Return, for each step, the position of the next convolution after it: the end of its look-ahead."""
    found = [len(kinds)] * len(kinds)
    for position in range(len(kinds) - 2, -1, -1):
        found[position] = position + 1 if kinds[position + 1] is LayerKind.CONV else found[position + 1]
    return found


def that_fit(problem: Problem, swaps: Sequence[Swap]) -> tuple[Swap, ...]:
    """Return the swaps with no read asked for, or awaited, before its bytes fit from then on until its use.

    A read that waits for memory holds up those behind it.
    """
    curve = Curve([op.peak_bytes for op in problem.trace.ops])
    sizes = [storage.nbytes for storage in problem.trace.storages]
    for swap in swaps:
        curve.add(swap.gap.after_op, swap.gap.before_op, -sizes[swap.gap.storage])
    fitting = {}
    for swap in sorted(swaps, key=lambda swap: (swap.gap.before_op, swap.gap)):
        end, nbytes = swap.gap.before_op, sizes[swap.gap.storage]
        fetch_op = curve.earliest(swap.fetch_op, end, limit_bytes=problem.budget_bytes - nbytes)
        arrived_op = swap.arrived_op
        if arrived_op is not None and arrived_op < fetch_op:
            arrived_op = None
        curve.add(fetch_op, end, nbytes)
        fitting[swap.gap] = replace(swap, fetch_op=fetch_op, arrived_op=arrived_op)
    return tuple(fitting[swap.gap] for swap in swaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One rung of the ladder, and what it is predicted to take."""

    label: str
    swaps: tuple[Swap, ...]
    prediction: Prediction


def first_that_fits(trials: Iterator[Trial], *, budget_bytes: int) -> tuple[Trial, int]:
    """Return the first trial within the budget, or the last one, and how many were made."""
    trial, count = next(trials), 1
    while trial.prediction.peak_bytes > budget_bytes and (higher := next(trials, None)) is not None:
        trial, count = higher, count + 1
    return trial, count


class _Vdnn:
    """What the three variants share."""

    name: ClassVar[str]
    about: ClassVar[About] = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="layer", memory="device and host", moment="static", objective="memory"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Rhu et al., MICRO 2016",
        reconstructed=(
            "a copy begins when the last reader of the input is done, one layer later than in the paper; a prefetch is "
            "put off until it fits; convolution algorithms only from a stated table"
        ),
        adapts=False,
    )

    def _static(self, problem: Problem, select: Selection) -> Plan:
        layers = layers_of(problem.trace)
        swaps = transfers(problem, layers, select(problem.trace, layers), synchronous=True)
        prediction = predict(problem, swaps)
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, swaps=swaps, prediction=prediction)


class VdnnAll(_Vdnn):
    """Offloads the input of every layer but activations and softmax, under every budget."""

    name = "vdnn_all"
    summary = "vDNN: offloads the inputs of all layers and waits at the end of each"

    def plan(self, problem: Problem) -> Plan:
        """Return a swap for every layer's input."""
        return self._static(problem, offload_all)


class VdnnConv(_Vdnn):
    """Offloads the inputs of convolutions, under every budget."""

    name = "vdnn_conv"
    summary = "vDNN: offloads the inputs of convolutions and waits at the end of each layer"

    def plan(self, problem: Problem) -> Plan:
        """Return a swap for every convolution's input."""
        return self._static(problem, offload_conv)


class VdnnDyn(_Vdnn):
    """Tries one configuration after the other and takes the first that fits.

    `algorithms` states the ways to run operators. Without it three configurations are left of the paper's seven:
    nothing, convolutions and all.
    """

    name = "vdnn_dyn"
    summary = "vDNN: the first that fits of no offloading, convolutions, all layers"
    about = replace(_Vdnn.about, adapts=True)

    def __init__(self, *, algorithms: Table | None = None) -> None:
        self._algorithms = dict(algorithms or {})

    def plan(self, problem: Problem) -> Plan:
        """Return the first configuration that fits, or the leanest with a note if none does."""
        trial, trials = first_that_fits(self._ladder(problem), budget_bytes=problem.budget_bytes)
        notes = [f"takes {trial.label}"]
        if trial.prediction.peak_bytes > problem.budget_bytes:
            notes.append(
                f"best effort: {trial.label} needs {format_bytes(trial.prediction.peak_bytes)}, "
                f"more than the budget of {format_bytes(problem.budget_bytes)}"
            )
        return Plan(
            policy=self.name,
            budget_bytes=problem.budget_bytes,
            swaps=trial.swaps,
            prediction=trial.prediction,
            notes=tuple(notes),
            trials=trials,
        )

    def _ladder(self, problem: Problem) -> Iterator[Trial]:
        layers = layers_of(problem.trace)
        selections = {"none": offload_none, "conv": offload_conv, "all": offload_all}
        gaps = {label: select(problem.trace, layers) for label, select in selections.items()}
        table = self._algorithms

        def trial(label: str, choice: dict[int, int], how: str) -> Trial:
            trace = with_algorithms(problem.trace, table, choice) if table else problem.trace
            changed = replace(problem, trace=trace)
            swaps = transfers(changed, layers, gaps[label], synchronous=True)
            named = f"offload {label}" + (f", {how} algorithms {_listing(choice)}" if table else "")
            return Trial(label=named, swaps=swaps, prediction=predict(changed, swaps))

        for label in ("none", "conv", "all"):
            yield trial(label, fastest(table), "fastest")
        if table:
            for label in ("conv", "all"):
                yield trial(label, fastest_within(table, spare_bytes=_spare_bytes(problem, gaps[label])), "greedy")
            for label in ("conv", "all"):
                yield trial(label, leanest(table), "leanest")


class Vdnn(VdnnDyn):
    """vDNN as its authors recommend it: `vdnn_dyn` under its plain name."""

    name = "vdnn"


def _spare_bytes(problem: Problem, gaps: Sequence[Gap]) -> dict[int, int]:
    """Return what the budget leaves at every operator while all `gaps` are empty."""
    curve = Curve([problem.budget_bytes - op.peak_bytes for op in problem.trace.ops])
    for gap in gaps:
        curve.add(gap.after_op, gap.before_op, problem.trace.storages[gap.storage].nbytes)
    return dict(enumerate(curve.values()))


def _listing(choice: dict[int, int]) -> str:
    return ", ".join(f"{op}:{k}" for op, k in sorted(choice.items()))
