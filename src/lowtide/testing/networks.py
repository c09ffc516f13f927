"""Traces of networks as PyTorch records them: operators by their names, what each saves, gradients, parameters.

A network is a list of layers. Each becomes a forward operator and, where its kind has one, a backward operator; where a
result has several readers their gradients are added up. Lifetimes follow from who touches what. One operator at the end
updates the parameters and lets the gradients go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lowtide.core.trace import Kind, Phase, Save, Storage, Trace
from lowtide.testing.traces import Step, make_trace

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

MIB = 1 << 20
INPUT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer. `inputs` are positions of earlier layers (`INPUT`: what the network is given)."""

    kind: str
    inputs: tuple[int, ...]
    nbytes: int = MIB
    duration_s: float = 1e-3
    module: str = ""
    scratch_bytes: int = 0
    param_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """What a kind of layer does. `extra_share` is the share of its output's bytes in a second result that it saves."""

    forward: str
    backward: str | None
    saves_inputs: bool = False
    saves_output: bool = False
    extra_share: float = 0.0
    in_place: bool = False


RULES = {
    "conv": _Rule(forward="aten::convolution", backward="aten::convolution_backward", saves_inputs=True),
    "norm": _Rule(
        forward="aten::native_batch_norm",
        backward="aten::native_batch_norm_backward",
        saves_inputs=True,
        extra_share=1 / 1024,
    ),
    "relu": _Rule(forward="aten::relu", backward="aten::threshold_backward", saves_output=True),
    "relu_": _Rule(forward="aten::relu_", backward="aten::threshold_backward", saves_output=True, in_place=True),
    "pool": _Rule(
        forward="aten::max_pool2d_with_indices",
        backward="aten::max_pool2d_with_indices_backward",
        saves_inputs=True,
        extra_share=2.0,
    ),
    "linear": _Rule(forward="aten::addmm", backward="aten::mm", saves_inputs=True),
    "gelu": _Rule(forward="aten::gelu", backward="aten::gelu_backward", saves_inputs=True),
    "layer_norm": _Rule(
        forward="aten::native_layer_norm",
        backward="aten::native_layer_norm_backward",
        saves_inputs=True,
        extra_share=1 / 256,
    ),
    "bmm": _Rule(forward="aten::bmm", backward="aten::bmm", saves_inputs=True),
    "softmax": _Rule(forward="aten::_softmax", backward="aten::_softmax_backward_data", saves_output=True),
    "dropout": _Rule(forward="aten::native_dropout", backward="aten::native_dropout_backward", extra_share=0.25),
    "add": _Rule(forward="aten::add", backward=None),
    "cat": _Rule(forward="aten::cat", backward=None),
}


@dataclass(slots=True)
class _Saved:
    packed_op: int
    uses: list[int] = field(default_factory=list)
    packs: int = 0


class _Tape:
    """The step being written."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.nbytes: list[int] = []
        self.kinds: list[Kind] = []
        self.born: list[int] = []
        self.producers: list[int | None] = []
        self.versions: list[int] = []
        self.saved: dict[int, _Saved] = {}

    def storage(self, nbytes: int, kind: Kind, *, born: int) -> int:
        self.nbytes.append(nbytes)
        self.kinds.append(kind)
        self.born.append(born)
        self.producers.append(born if born >= 0 else None)
        self.versions.append(0)
        return len(self.nbytes) - 1

    def op(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def save(self, storage: int, op: int) -> None:
        self.saved.setdefault(storage, _Saved(packed_op=op)).packs += 1

    def trace(self, *, model: str, forward_ops: int) -> Trace:
        count = len(self.steps)
        last_touch = list(self.born)
        last_forward = list(self.born)
        for index, step in enumerate(self.steps):
            for storage in (*step.reads, *step.writes):
                last_touch[storage] = index
                if index < forward_ops:
                    last_forward[storage] = index
        storages, saves = [], []
        for index, nbytes in enumerate(self.nbytes):
            persistent = self.kinds[index] in (Kind.PARAM, Kind.INPUT)
            storages.append(
                Storage(
                    nbytes=nbytes,
                    kind=self.kinds[index],
                    first_op=self.born[index],
                    last_op=count if persistent else last_touch[index],
                    producer=self.producers[index],
                    versions=self.versions[index],
                )
            )
            if (saved := self.saved.get(index)) is not None:
                uses = tuple(sorted(set(saved.uses)))
                saves.append(
                    Save(
                        storage=index,
                        packed_op=saved.packed_op,
                        free_op=None if persistent else last_forward[index] + 1,
                        uses=uses,
                        released_op=uses[-1],
                        packs=saved.packs,
                    )
                )
        return make_trace(self.steps, storages, saves, model=model)


def network_trace(layers: Sequence[Layer], *, input_bytes: int = MIB, model: str = "network") -> Trace:
    """Return one training step of the network: forward, backward, update."""
    tape = _Tape()
    given = tape.storage(input_bytes, Kind.INPUT, born=-1)
    results: list[int] = []
    params: list[int | None] = []
    extras: list[int | None] = []

    def result_of(position: int) -> int:
        return given if position == INPUT else results[position]

    for position, layer in enumerate(layers):
        rule = RULES[layer.kind]
        op = len(tape.steps)
        reads = [result_of(source) for source in layer.inputs]
        param = tape.storage(layer.param_bytes, Kind.PARAM, born=-1) if layer.param_bytes else None
        params.append(param)
        if rule.in_place:
            result = reads[0]
            tape.versions[result] += 1
        else:
            result = tape.storage(layer.nbytes, Kind.ACTIVATION, born=op)
        extra = None
        if rule.extra_share:
            extra = tape.storage(max(1, int(layer.nbytes * rule.extra_share)), Kind.ACTIVATION, born=op)
        extras.append(extra)
        results.append(result)
        tape.op(
            Step(
                name=rule.forward,
                phase=Phase.FORWARD,
                duration_s=layer.duration_s,
                reads=tuple(dict.fromkeys([*reads, *([] if param is None else [param])])),
                writes=(result, *(() if extra is None else (extra,))),
                scratch_bytes=layer.scratch_bytes,
                module=layer.module or f"{layer.kind}{position}",
            )
        )
        for storage in _saved_by(rule, reads, result, extra, param):
            tape.save(storage, op)
    forward_ops = len(tape.steps)
    grads = _backward(tape, layers, results=results, params=params, extras=extras, given=given)
    _update(tape, [param for param in params if param is not None], grads)
    return tape.trace(model=model, forward_ops=forward_ops)


def _saved_by(rule: _Rule, reads: Sequence[int], result: int, extra: int | None, param: int | None) -> list[int]:
    """Return the storages that a layer's backward operator is given."""
    found = list(reads) if rule.saves_inputs else []
    if rule.saves_output:
        found.append(result)
    if extra is not None:
        found.append(extra)
    if param is not None and rule.saves_inputs:
        found.append(param)
    return list(dict.fromkeys(found))


def _backward(
    tape: _Tape,
    layers: Sequence[Layer],
    *,
    results: Sequence[int],
    params: Sequence[int | None],
    extras: Sequence[int | None],
    given: int,
) -> list[int]:
    """Write the backward pass and return the parameters' gradients."""
    pending: dict[int, list[int]] = {}
    param_grads: list[int] = []
    for position in range(len(layers) - 1, -1, -1):
        layer, rule = layers[position], RULES[layers[position].kind]
        grad = _gathered(tape, pending.pop(position, []), layer)
        if grad is None:
            # Nobody read the result: it is a part of the loss, whose gradient appears here.
            op = tape.op(Step(name="aten::ones_like", phase=Phase.BACKWARD, duration_s=layer.duration_s / 10))
            grad = tape.storage(layer.nbytes, Kind.OTHER, born=op)
            tape.steps[op] = replace(tape.steps[op], writes=(grad,))
        if rule.backward is None:
            for source in set(layer.inputs) - {INPUT}:
                pending.setdefault(source, []).append(grad)
            continue
        reads = [given if source == INPUT else results[source] for source in layer.inputs]
        saved = _saved_by(rule, reads, results[position], extras[position], params[position])
        op = tape.op(
            Step(
                name=rule.backward,
                phase=Phase.BACKWARD,
                duration_s=2 * layer.duration_s,
                reads=tuple(dict.fromkeys([grad, *saved])),
                scratch_bytes=layer.scratch_bytes,
            )
        )
        for storage in saved:
            tape.saved[storage].uses.append(op)
        writes = []
        for source in dict.fromkeys(layer.inputs):
            if source != INPUT:
                made = tape.storage(layers[source].nbytes, Kind.OTHER, born=op)
                pending.setdefault(source, []).append(made)
                writes.append(made)
        if params[position] is not None:
            made = tape.storage(layer.param_bytes, Kind.GRAD, born=op)
            param_grads.append(made)
            writes.append(made)
        tape.steps[op] = replace(tape.steps[op], writes=tuple(writes))
    return param_grads


def _gathered(tape: _Tape, grads: list[int], layer: Layer) -> int | None:
    """Return the sum of the gradients of a result, adding them up where there are several."""
    grads = list(dict.fromkeys(grads))
    while len(grads) > 1:
        first, second = grads.pop(0), grads.pop(0)
        op = tape.op(
            Step(name="aten::add", phase=Phase.BACKWARD, duration_s=layer.duration_s / 10, reads=(first, second))
        )
        total = tape.storage(layer.nbytes, Kind.OTHER, born=op)
        tape.steps[op] = replace(tape.steps[op], writes=(total,))
        grads.insert(0, total)
    return grads[0] if grads else None


def _update(tape: _Tape, params: Sequence[int], grads: Sequence[int]) -> None:
    tape.op(
        Step(
            name="aten::_foreach_add_",
            phase=Phase.UPDATE,
            duration_s=1e-4,
            reads=(*params, *grads),
            writes=tuple(params),
        )
    )


def networks(*, max_layers: int = 12) -> SearchStrategy[Trace]:
    """Return a strategy for networks: random kinds, shortcuts, joins, in-place operators, sizes and times."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Trace:
        layers: list[Layer] = []
        for position in range(draw(st.integers(1, max_layers))):
            kind = draw(st.sampled_from(sorted(RULES)))
            inputs = [position - 1]
            if position and kind in ("add", "cat", "bmm"):
                inputs.append(draw(st.integers(max(0, position - 6), position - 1)))
            nbytes = draw(st.sampled_from((4096, 100_000, MIB, 3 * MIB)))
            if RULES[kind].in_place:
                # PyTorch refuses to change what a backward operator needs, and the input is not the network's own.
                if position == 0 or RULES[layers[-1].kind].saves_output:
                    kind = "relu"
                else:
                    nbytes = layers[-1].nbytes
            layers.append(
                Layer(
                    kind=kind,
                    inputs=tuple(inputs),
                    nbytes=nbytes,
                    duration_s=draw(st.sampled_from((1e-4, 1e-3, 2.5e-3, 1e-2))),
                    scratch_bytes=draw(st.sampled_from((0, 0, 1000, MIB))),
                    param_bytes=4096 if kind in ("conv", "linear", "norm", "layer_norm") else 0,
                )
            )
        return network_trace(layers, input_bytes=draw(st.sampled_from((4096, MIB))), model="random network")

    return build()
