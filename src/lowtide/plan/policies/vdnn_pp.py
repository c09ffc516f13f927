"""vDNN++: vDNN's candidates and prefetches without its waits (Shriram et al., IPDPS 2019).

An input is freed once its copy is complete, and an allocation that finds no memory waits until something is
freed: compute stalls only where memory is really short. Copies may be compressed on the host, after the transfer, which
shrinks the pinned memory there and changes nothing in fast memory or on the link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lowtide.core.plan import IDENTITY, Plan, Problem, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policies.vdnn import (
    Selection,
    Trial,
    first_that_fits,
    offload_all,
    offload_conv,
    offload_none,
    transfers,
)
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.views.layers import Layer, LayerKind, layers_of


def offload_alternate_conv(trace: Trace, layers: Sequence[Layer]) -> tuple[Gap, ...]:
    """Return the gaps of the inputs of every other convolution, the first one included."""
    convs = [layer.index for layer in layers if layer.kind is LayerKind.CONV]
    skipped = {storage for index in convs[1::2] for storage in layers[index].inputs}
    kept = {storage for index in convs[::2] for storage in layers[index].inputs}
    return tuple(gap for gap in offload_conv(trace, layers) if gap.storage in kept or gap.storage not in skipped)


def host_bytes(trace: Trace, swaps: Sequence[Swap], *, ratio: float = 1.0) -> int:
    """Return the most bytes that wait outside of fast memory at once; of each copy, `ratio` of its bytes are left."""
    curve = Curve([0] * len(trace.ops))
    for swap in swaps:
        curve.add(swap.gap.after_op, swap.gap.before_op, int(trace.storages[swap.gap.storage].nbytes * ratio))
    return max(curve.values(), default=0)


_SELECTIONS: dict[str, Selection] = {
    "none": offload_none,
    "alternate_conv": offload_alternate_conv,
    "conv": offload_conv,
    "all": offload_all,
}


class VdnnPlusPlus:
    """Moves what vDNN moves, and waits only for memory.

    `offload`: "none", "alternate_conv", "conv", "all", or "dyn" for the first of them that fits. `host_ratio`: the
    compressed size of a copy on the host, as a share of its bytes, such as a codec's
    `ZeroValue().ratio_model(Stats(density=0.5))`; a note says what it comes to. `codec`: the copies go through it, and
    take what is left of them, if the executor has it.
    """

    name = "vdnn_pp"
    summary = "vDNN++: vDNN's offloading without waiting at the end of layers"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.SWAP_IN,
        classified=Classified(granularity="layer", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Shriram et al., IPDPS 2019",
        reconstructed=(
            "the order in which offload sets are tried; which codec compresses on the host is not known: it is "
            "stated; the allocation order against fragmentation is the allocator's matter here"
        ),
    )

    def __init__(self, *, offload: str = "dyn", host_ratio: float = 1.0, codec: str = IDENTITY.name) -> None:
        if offload != "dyn" and offload not in _SELECTIONS:
            raise BadArgument(f"unknown offload set {offload!r}: choose one of dyn, {', '.join(_SELECTIONS)}")
        if not 0 < host_ratio <= 1:
            raise BadArgument(f"host_ratio is {host_ratio}: it is a share of the bytes, above 0 and at most 1")
        self._offload = offload
        self._host_ratio = host_ratio
        self._codec = codec
        self.about = replace(type(self).about, adapts=offload == "dyn")

    def plan(self, problem: Problem) -> Plan:
        """Return the chosen set of swaps, or the first set that fits."""
        trial, trials = first_that_fits(self._ladder(problem), budget_bytes=problem.budget_bytes)
        pinned_bytes = host_bytes(problem.trace, trial.swaps)
        notes = [f"takes {trial.label}; pins at most {format_bytes(pinned_bytes)} on the host"]
        if self._host_ratio < 1:
            packed_bytes = host_bytes(problem.trace, trial.swaps, ratio=self._host_ratio)
            notes.append(f"compressed on the host: {format_bytes(packed_bytes)}")
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
            trials=trials if self.about.adapts else 0,
        )

    def _ladder(self, problem: Problem) -> Iterator[Trial]:
        layers = layers_of(problem.trace)
        for label in _SELECTIONS if self._offload == "dyn" else (self._offload,):
            gaps = _SELECTIONS[label](problem.trace, layers)
            swaps = transfers(problem, layers, gaps, synchronous=False)
            if any(codec.name == self._codec for codec in problem.codecs):
                swaps = tuple(replace(swap, codec=self._codec) for swap in swaps)
            yield Trial(label=f"offload {label}", swaps=swaps, prediction=predict(problem, swaps))
