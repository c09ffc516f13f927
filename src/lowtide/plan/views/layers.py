"""A trace seen as layers, which is how the first swapping systems saw training.

A *layer* is a forward operator for which autograd saved something, with the operators that follow it up to the next
one. A trace does not tell all of them: a storage that several layers save is recorded once, with the first of them, and
small ones are not recorded at all. But convolutions, matrix products, normalisations, pools and attention always keep
what they read, so an operator of these kinds is taken for a layer, and for one that saved what it read.

The backward pass unpacks in the opposite order. So the first layer that saved a storage owns its last unpack, the
second one the last but one, and so on. A backward operator that reads a layer's parameters belongs to it as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from lowtide.core.trace import Gap, Kind, Op, Phase, Reach, Trace
from lowtide.plan.policy import activation_gaps


class LayerKind(StrEnum):
    """What a layer computes, as far as its operator's name tells."""

    CONV = "conv"
    LINEAR = "linear"
    NORM = "norm"
    ACTIVATION = "activation"
    POOL = "pool"
    JOIN = "join"
    CONCAT = "concat"
    EMBEDDING = "embedding"
    ATTENTION = "attention"
    LOSS = "loss"
    """A softmax or a loss."""
    DATA = "data"
    """Operators before the first layer: they make the batch."""
    OTHER = "other"


# Looked up in this order: "scaled_dot_product_attention" is not a softmax, "max_pool2d_with_indices" not an index.
_WORDS: tuple[tuple[LayerKind, tuple[str, ...]], ...] = (
    (LayerKind.ATTENTION, ("attention",)),
    (LayerKind.EMBEDDING, ("embedding",)),
    (LayerKind.CONV, ("conv",)),
    (LayerKind.POOL, ("pool",)),
    (LayerKind.NORM, ("_norm", "batchnorm", "layernorm")),
    (LayerKind.LOSS, ("softmax", "loss", "cross_entropy")),
    (LayerKind.LINEAR, ("addmm", "linear", "bmm", "matmul", "gemm")),
    (
        LayerKind.ACTIVATION,
        ("relu", "gelu", "silu", "elu", "sigmoid", "tanh", "threshold", "hardtanh", "hardswish", "clamp_min", "mish"),
    ),
)
_NAMES = {
    "mm": LayerKind.LINEAR,
    "add": LayerKind.JOIN,
    "add_": LayerKind.JOIN,
    "sum": LayerKind.OTHER,
    "cat": LayerKind.CONCAT,
    "concat": LayerKind.CONCAT,
}
_KEEPS_OPERANDS = frozenset({LayerKind.CONV, LayerKind.LINEAR, LayerKind.NORM, LayerKind.POOL, LayerKind.ATTENTION})
# What the step finds in memory, or leaves there: no layer's input or output.
_STATE = frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A stretch of forward operators and the stretch of backward operators that belongs to it.

    `inputs` are the storages its operators read and did not make, `saves` those that autograd saved for it (where the
    executor moves pages: that backward touches again); neither has parameters or buffers. `backward` reaches from the
    first use of these to the last (empty: none was recorded).
    """

    index: int
    kind: LayerKind
    name: str
    module: str
    forward: range
    backward: range
    inputs: tuple[int, ...]
    saves: tuple[int, ...]
    forward_s: float
    backward_s: float


def kind_of(op: Op) -> LayerKind:
    """Return what an operator computes, from its name."""
    name = op.name.lower().rpartition("::")[2].partition(".")[0]
    if name in _NAMES:
        return _NAMES[name]
    for kind, words in _WORDS:
        if any(word in name for word in words):
            return kind
    return LayerKind.OTHER


def layers_of(trace: Trace) -> tuple[Layer, ...]:
    """Return the layers of a trace in the order of the forward pass."""
    kinds = [kind_of(op) for op in trace.ops]
    kept = _kept_by_touches(trace, kinds) if trace.reach is Reach.TOUCHED else _kept_by_saves(trace, kinds)
    # What the engine adds up between two backward operators is recorded as forward, but saves nothing.
    heads = {
        index: set(kept.get(index, ()))
        for index, op in enumerate(trace.ops)
        if op.phase is Phase.FORWARD and (kept.get(index) or kinds[index] in _KEEPS_OPERANDS or index == 0)
    }
    unpacks = {head: [use for uses in kept.get(head, {}).values() for use in uses] for head in heads}
    _add_uses_of_parameters(trace, unpacks)
    stretches = _stretches(trace, sorted(heads))
    return tuple(
        _layer(trace, number, stretch, kind=kinds[stretch.start], keeps=heads[stretch.start], unpacks=unpacks)
        for number, stretch in enumerate(stretches)
    )


def crossing_gaps(trace: Trace) -> dict[int, Gap]:
    """Return, for each storage that has one, the gap in which it waits for the backward pass."""
    backward = (index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
    first_op = next(backward, len(trace.ops))
    found: dict[int, Gap] = {}
    for gap in activation_gaps(trace):
        if gap.before_op >= first_op:
            found.setdefault(gap.storage, gap)
    return found


def relu_results(trace: Trace) -> frozenset[int]:
    """Return the storages that a ReLU of the forward pass writes, whose values are zeros for a good part.

    Its relatives (leaky, parametric, GELU) leave none.
    """
    return frozenset(
        storage
        for op in trace.ops
        if op.phase is Phase.FORWARD and op.name.rpartition("::")[2].partition(".")[0].rstrip("_") == "relu"
        for storage in op.writes
    )


def step_at(starts: Sequence[int], op: int) -> int:
    """Return the position of the last of the ascending `starts` that is not after `op` (-1: all are)."""
    return bisect_right(starts, op) - 1


def _stretches(trace: Trace, heads: Sequence[int]) -> list[range]:
    """Return the forward operators from each head to the next, or to the end of the forward pass around it."""
    found = []
    for head, following in pairwise([*heads, len(trace.ops)]):
        stop = head + 1
        while stop < following and trace.ops[stop].phase is Phase.FORWARD:
            stop += 1
        found.append(range(head, stop))
    return found


_Kept = dict[int, dict[int, list[int]]]
"""What each forward operator keeps for its backward, and the backward operators that use it."""


def _kept_by_saves(trace: Trace, kinds: Sequence[LayerKind]) -> _Kept:
    """Return what autograd saved, by the operator that saved it first and those that are known to keep operands."""
    saved_at: dict[int, set[int]] = {}
    uses: dict[int, set[int]] = {}
    for save in trace.saves:
        saved_at.setdefault(save.packed_op, set()).add(save.storage)
        uses.setdefault(save.storage, set()).update(save.uses)
    savers: dict[int, list[int]] = {}
    for index, op in enumerate(trace.ops):
        if op.phase is Phase.FORWARD:
            keeps = saved_at.get(index, set())
            if kinds[index] in _KEEPS_OPERANDS:
                keeps = keeps.union(uses.keys() & set(op.reads))
            for storage in keeps:
                savers.setdefault(storage, []).append(index)
    found: _Kept = {}
    for storage, owners in savers.items():
        for owner in owners:
            found.setdefault(owner, {})[storage] = []
        for owner, use in zip(owners, sorted(uses[storage], reverse=True), strict=False):
            found[owner][storage].append(use)
    return found


def _kept_by_touches(trace: Trace, kinds: Sequence[LayerKind]) -> _Kept:
    """Return what forward operators touch and backward ones touch again, where no save tells.

    Backward comes back in reverse: its first touch of a storage is for the last forward operator that needs it. A layer
    that keeps its operands does not need its result.
    """
    first_op = next((index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD), len(trace.ops))
    owners: dict[int, list[int]] = {}
    uses: dict[int, list[int]] = {}
    for index, op in enumerate(trace.ops):
        if op.phase is Phase.FORWARD and index < first_op:
            touched = op.reads if kinds[index] in _KEEPS_OPERANDS else (*op.reads, *op.writes)
        else:
            touched = op.reads if op.phase is Phase.BACKWARD else ()
        for storage in dict.fromkeys(touched):
            block = trace.storages[storage]
            if block.kind is Kind.ACTIVATION and block.nbytes >= trace.least_bytes:
                (owners if index < first_op else uses).setdefault(storage, []).append(index)
    found: _Kept = {}
    for storage, forward in owners.items():
        for owner, use in zip(reversed(forward), uses.get(storage, ()), strict=False):
            found.setdefault(owner, {}).setdefault(storage, []).append(use)
    return found


def _add_uses_of_parameters(trace: Trace, unpacks: dict[int, list[int]]) -> None:
    """Count the backward operators that read a layer's parameters to it."""
    reader: dict[int, int] = {}
    for index, op in enumerate(trace.ops):
        for storage in op.reads:
            if trace.storages[storage].kind is Kind.PARAM:
                if index in unpacks:
                    reader[storage] = index
                elif op.phase is Phase.BACKWARD and storage in reader:
                    unpacks[reader[storage]].append(index)


def _layer(
    trace: Trace, number: int, forward: range, *, kind: LayerKind, keeps: set[int], unpacks: dict[int, list[int]]
) -> Layer:
    head = trace.ops[forward.start]
    # A storage may be unpacked in another pass before this one: only what runs after the layer is its backward.
    uses = sorted(use for use in unpacks.get(forward.start, ()) if use >= forward.stop)
    backward = range(uses[0], min(uses[-1] + 1, len(trace.ops))) if uses else range(len(trace.ops), len(trace.ops))
    made: set[int] = set()
    inputs: dict[int, None] = {}
    for op in (trace.ops[index] for index in forward):
        for storage in op.reads:
            if storage not in made and trace.storages[storage].kind not in _STATE:
                inputs[storage] = None
        made.update(op.writes)
    return Layer(
        index=number,
        kind=kind if keeps or kind in _KEEPS_OPERANDS else LayerKind.DATA,
        name=head.name,
        module=head.module,
        forward=forward,
        backward=backward,
        inputs=tuple(inputs),
        saves=tuple(sorted(storage for storage in keeps if trace.storages[storage].kind not in _STATE)),
        forward_s=sum(trace.ops[index].duration_s for index in forward),
        backward_s=sum(trace.ops[index].duration_s for index in backward),
    )
