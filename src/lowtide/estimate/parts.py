"""Whose bytes a step's memory is: weights, gradients, optimizer state, activations and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from lowtide.core.trace import Kind, Trace


class Part(StrEnum):
    """What people call the kinds of a training's tensors."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    OTHER = "inputs and scratch"


_PART_OF = {
    Kind.PARAM: Part.WEIGHTS,
    Kind.BUFFER: Part.WEIGHTS,
    Kind.GRAD: Part.GRADIENTS,
    Kind.OPTIMIZER: Part.OPTIMIZER,
    Kind.ACTIVATION: Part.ACTIVATIONS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One part's bytes: the most at once, and at the step's peak, where the parts add up to it."""

    most_bytes: int
    at_peak_bytes: int


def parts_of(trace: Trace) -> dict[Part, Share]:
    """Return what each part of a step takes without any budget; bytes of no known storage are others'."""
    end = len(trace.ops)
    changes = {part: [0] * (end + 1) for part in Part}
    for storage in trace.storages:
        change = changes[_PART_OF.get(storage.kind, Part.OTHER)]
        change[max(storage.first_op, 0)] += storage.nbytes
        change[min(storage.last_op + 1, end)] -= storage.nbytes
    alive = {part: list(accumulate(change))[:end] for part, change in changes.items()}
    if not end:
        return {part: Share(most_bytes=0, at_peak_bytes=0) for part in Part}
    peak_op = max(range(end), key=lambda index: trace.ops[index].peak_bytes)
    found = {part: Share(most_bytes=max(curve), at_peak_bytes=curve[peak_op]) for part, curve in alive.items()}
    known = sum(share.at_peak_bytes for part, share in found.items() if part is not Part.OTHER)
    rest = max(0, trace.peak_bytes - known)
    found[Part.OTHER] = Share(most_bytes=max(found[Part.OTHER].most_bytes, rest), at_peak_bytes=rest)
    return found
