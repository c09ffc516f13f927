"""Traces to test policies on: a few hand-made shapes, and Hypothesis strategies for random ones.

Hypothesis is only imported by the strategies, so the shapes can be used without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from lowtide.core.machine import Access, Link, Machine
from lowtide.core.plan import Problem
from lowtide.core.trace import HELD_KINDS, Kind, Op, Phase, Reach, Save, Storage, Trace

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An operator before its place in time and its memory are known; `scratch_bytes` live only while it runs."""

    name: str
    phase: Phase
    duration_s: float
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    scratch_bytes: int = 0
    module: str = ""


def make_trace(
    steps: Sequence[Step],
    storages: Sequence[Storage],
    saves: Sequence[Save],
    *,
    static_bytes: int = 0,
    model: str = "",
    reach: Reach = Reach.SAVED,
    least_bytes: int = 0,
) -> Trace:
    """Return the trace of these operators, with the byte curve that the storages' lifetimes imply.

    `static_bytes` are alive beside the storages; those that outlive the step on both sides are added to them.
    """
    change = [0] * (len(steps) + 2)
    for storage in storages:
        change[max(storage.first_op, 0)] += storage.nbytes
        change[min(storage.last_op, len(steps)) + 1] -= storage.nbytes
    live = list(accumulate(change))
    starts = [0.0, *accumulate(step.duration_s for step in steps)]
    ops = tuple(
        Op(
            name=step.name,
            phase=step.phase,
            start_s=starts[index],
            duration_s=step.duration_s,
            peak_bytes=static_bytes + live[index] + step.scratch_bytes,
            reads=step.reads,
            writes=step.writes,
            module=step.module,
        )
        for index, step in enumerate(steps)
    )
    outlive = sum(storage.nbytes for storage in storages if storage.first_op < 0 and storage.last_op >= len(steps))
    return Trace(
        ops=ops,
        storages=tuple(storages),
        saves=tuple(saves),
        static_bytes=static_bytes + outlive,
        model=model,
        reach=reach,
        least_bytes=least_bytes,
    )


def chain_trace(
    layers: int,
    *,
    nbytes: int = 1 << 20,
    duration_s: float = 1e-3,
    static_bytes: int = 0,
    scratch_bytes: int = 0,
    held_until: dict[int, int] | None = None,
    model: str = "chain",
) -> Trace:
    """Return a forward and backward pass over a chain of layers that each save their output.

    Layer k is operator k on the way forward and operator `2 * layers - 1 - k` on the way back, where its output is
    unpacked and released. `held_until` names layers whose output a later layer reads too, which keeps the program's
    hold on it until then: a residual or skip connection.
    """
    held = held_until or {}
    last = 2 * layers - 1
    readers: dict[int, list[int]] = {}
    storages, saves, steps = [], [], []
    for layer in range(layers):
        back = last - layer
        readers.setdefault(layer + 1, []).append(layer)
        if layer in held:
            readers.setdefault(held[layer], []).append(layer)
        free = max(layer + 1, held.get(layer, 0)) + 1
        storages.append(Storage(nbytes=nbytes, kind=Kind.ACTIVATION, first_op=layer, last_op=back, producer=layer))
        saves.append(Save(storage=layer, packed_op=layer, free_op=min(free, back), uses=(back,), released_op=back))
    for layer in range(layers):
        reads = tuple(sorted(set(readers.get(layer, ()))))
        steps.append(
            Step(
                name=f"layer{layer}",
                phase=Phase.FORWARD,
                duration_s=duration_s,
                reads=reads,
                writes=(layer,),
                scratch_bytes=scratch_bytes,
            )
        )
    steps += [
        Step(
            name=f"layer{layer}.backward",
            phase=Phase.BACKWARD,
            duration_s=2 * duration_s,
            reads=(layer,),
            scratch_bytes=scratch_bytes,
        )
        for layer in reversed(range(layers))
    ]
    return make_trace(steps, storages, saves, static_bytes=static_bytes, model=model)


def residual_trace(blocks: int, *, nbytes: int = 1 << 20, duration_s: float = 1e-3) -> Trace:
    """Return a chain in blocks of three layers, the first of which is added to the last of its block."""
    held = {3 * block: 3 * block + 2 for block in range(blocks)}
    return chain_trace(
        3 * blocks, nbytes=nbytes, duration_s=duration_s, scratch_bytes=nbytes, held_until=held, model="residual"
    )


def skip_trace(depth: int, *, nbytes: int = 1 << 20, duration_s: float = 1e-3) -> Trace:
    """Return a chain in which every layer of the first half is read again by its mirror image, as in a U-Net."""
    held = {layer: 2 * depth - 1 - layer for layer in range(depth - 1)}
    return chain_trace(2 * depth, nbytes=nbytes, duration_s=duration_s, held_until=held, model="skip")


def training_trace(
    layers: int,
    *,
    nbytes: int = 1 << 20,
    activation_bytes: int = 1 << 20,
    duration_s: float = 1e-3,
    update_s: float = 1e-3,
    static_bytes: int = 0,
    scratch_bytes: int = 0,
    moments: int = 2,
    keeps_gradients: bool = False,
    updates_at_once: bool = False,
    least_bytes: int = 0,
) -> Trace:
    """Return a training step whose executor moves pages: parameters, gradients and moments have gaps as activations do.

    Operator k is layer k on the way forward, `2 * layers - 1 - k` on the way back (both read its parameter; the second
    makes its gradient and releases its output), `2 * layers + k` its update, which writes parameter and moments; or one
    operator updates all of them (`updates_at_once`: foreach). After the last one `zero_grad` frees the gradients, or
    only fills them with zeros (`keeps_gradients`), one more operator.

    Storages: parameters, then their moments one after the other, gradients, activations; each group by layer.
    """
    parameters = range(layers)
    state = [range(layers * (1 + number), layers * (2 + number)) for number in range(moments)]
    gradients = range(layers * (1 + moments), layers * (2 + moments))
    outputs = range(layers * (2 + moments), layers * (3 + moments))

    def updated(chosen: Sequence[int], name: str) -> Step:
        written = (*(parameters[k] for k in chosen), *(moment[k] for moment in state for k in chosen))
        reads = (*written, *(gradients[k] for k in chosen))
        return Step(name=name, phase=Phase.UPDATE, duration_s=len(chosen) * update_s, reads=reads, writes=written)

    forward = [
        Step(
            name=f"layer{k}",
            phase=Phase.FORWARD,
            duration_s=duration_s,
            reads=(parameters[k], *outputs[:k][-1:]),
            writes=(outputs[k],),
            scratch_bytes=scratch_bytes,
        )
        for k in range(layers)
    ]
    backward = [
        Step(
            name=f"layer{k}.backward",
            phase=Phase.BACKWARD,
            duration_s=2 * duration_s,
            reads=(parameters[k], outputs[k], *((gradients[k],) if keeps_gradients else ())),
            writes=(gradients[k],),
            scratch_bytes=scratch_bytes,
        )
        for k in reversed(range(layers))
    ]
    updates = (
        [updated(range(layers), "update")]
        if updates_at_once
        else [updated((k,), f"layer{k}.update") for k in range(layers)]
    )
    zeroed = [Step(name="zero", phase=Phase.UPDATE, duration_s=update_s, writes=tuple(gradients))]
    steps = [*forward, *backward, *updates, *(zeroed if keeps_gradients else ())]
    end, back = len(steps), [2 * layers - 1 - k for k in range(layers)]

    def living_on(kind: Kind) -> list[Storage]:
        return [Storage(nbytes=nbytes, kind=kind, first_op=-1, last_op=end, versions=1) for _ in range(layers)]

    storages = [
        *living_on(Kind.PARAM),
        *(storage for _ in range(moments) for storage in living_on(Kind.OPTIMIZER)),
        *(
            living_on(Kind.GRAD)
            if keeps_gradients
            else [Storage(nbytes=nbytes, kind=Kind.GRAD, first_op=k, last_op=end - 1, producer=k) for k in back]
        ),
        *(
            Storage(nbytes=activation_bytes, kind=Kind.ACTIVATION, first_op=k, last_op=back[k], producer=k)
            for k in range(layers)
        ),
    ]
    return make_trace(
        steps,
        storages,
        (),
        static_bytes=static_bytes,
        model="training",
        reach=Reach.TOUCHED,
        least_bytes=least_bytes,
    )


def machine_of(link: Link, *, tier: str = "spill") -> Machine:
    """Return a machine with one tier."""
    return Machine(name="test", links={tier: link}, source="stated")


def traces(*, max_ops: int = 30, max_storages: int = 20) -> SearchStrategy[Trace]:
    """Return a strategy for valid traces of any shape.

    In order, out of order, unused, held and repeated saves; operators that read what earlier ones made, draw random
    numbers, or change a storage in place.
    """
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Trace:
        count = draw(st.integers(1, max_ops))
        moment = st.integers(0, count - 1)
        storages: list[Storage] = []
        saves: list[Save] = []
        reads: list[set[int]] = [set() for _ in range(count)]
        writes: list[set[int]] = [set() for _ in range(count)]
        for index in range(draw(st.integers(0, max_storages))):
            nbytes = draw(st.sampled_from((0, 1, 4096, 100_000, 1 << 20, 3 << 20)))
            first = draw(moment)
            uses = sorted(draw(st.sets(st.integers(first + 1, count - 1), max_size=3))) if first + 1 < count else []
            last = max([first, *uses, draw(moment)])
            free = draw(st.one_of(st.none(), st.integers(first + 1, min(first + 4, count))))
            writes[first].add(index)
            for use in uses:
                reads[use].add(index)
                # What was unpacked for one operator may be read by the next one of the same node.
                if use + 1 <= last and draw(st.booleans()):
                    reads[use + 1].add(index)
            # What made it may have read what was there before, and something may change it on the way.
            for other in draw(st.sets(st.sampled_from(range(index)), max_size=2)) if index else ():
                if storages[other].first_op < first <= storages[other].last_op:
                    reads[first].add(other)
            if not draw(st.integers(0, 9)):
                changed = draw(st.integers(first, last))
                reads[changed].add(index)
                writes[changed].add(index)
            storages.append(Storage(nbytes=nbytes, kind=Kind.ACTIVATION, first_op=first, last_op=last, producer=first))
            if draw(st.integers(0, 5)):
                saves.append(Save(storage=index, packed_op=first, free_op=free, uses=tuple(uses), released_op=last))
        steps = [
            Step(
                name=draw(st.sampled_from(("aten::mul", "aten::mul", "aten::mul", "aten::native_dropout"))),
                phase=Phase.FORWARD if 2 * index < count else Phase.BACKWARD,
                duration_s=draw(st.sampled_from((0.0, 1e-4, 1e-3, 2.5e-3, 1e-2))),
                reads=tuple(sorted(reads[index])),
                writes=tuple(sorted(writes[index])),
                scratch_bytes=draw(st.sampled_from((0, 0, 1000, 1 << 20))),
            )
            for index in range(count)
        ]
        return make_trace(steps, storages, saves, static_bytes=draw(st.sampled_from((0, 1 << 20))), model="random")

    return build()


def touched_traces(*, max_ops: int = 30, max_storages: int = 20) -> SearchStrategy[Trace]:
    """Return a strategy for valid traces of steps whose executor moves pages.

    Storages that live on, that the step makes, frees, or both, of every kind; touched by any operators of their life or
    by none; some of them too small to be worth moving. What the step makes and leaves alive may have an heir.
    """
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Trace:
        count = draw(st.integers(1, max_ops))
        moment = st.integers(0, count - 1)
        storages: list[Storage] = []
        reads: list[set[int]] = [set() for _ in range(count)]
        writes: list[set[int]] = [set() for _ in range(count)]
        for index in range(draw(st.integers(0, max_storages))):
            first = draw(st.one_of(st.just(-1), moment))
            last = draw(st.one_of(st.just(count), st.integers(max(first, 0), count - 1)))
            kinds = (Kind.PARAM, Kind.BUFFER, Kind.OPTIMIZER, Kind.INPUT) if first < 0 else (Kind.ACTIVATION,)
            alive = st.integers(max(first, 0), min(last, count - 1))
            made = first >= 0 and draw(st.integers(0, 9)) > 0
            if made:
                writes[first].add(index)
            changes = {op for op in draw(st.sets(alive, max_size=2)) if op > first}
            for op in draw(st.sets(alive, max_size=4)) | changes:
                # An operator that made a storage need not read it.
                if not (made and op == first):
                    reads[op].add(index)
            for op in changes:
                writes[op].add(index)
            storages.append(
                Storage(
                    nbytes=draw(st.sampled_from((0, 1, 4096, 100_000, 1 << 20, 3 << 20))),
                    kind=draw(st.sampled_from((*kinds, Kind.GRAD, Kind.OTHER))),
                    first_op=first,
                    last_op=last,
                    producer=first if made else None,
                    versions=len(changes),
                )
            )
        for parent in [block for block in storages if block.first_op > 0 and block.last_op == count]:
            if draw(st.booleans()):
                freed = draw(st.integers(0, parent.first_op - 1))
                for op in draw(st.sets(st.integers(0, freed), max_size=2)) if draw(st.booleans()) else ():
                    draw(st.sampled_from((reads, writes)))[op].add(len(storages))
                storages.append(replace(parent, first_op=-1, last_op=freed, producer=None, versions=0))
        steps = [
            Step(
                name=draw(st.sampled_from(("aten::mul", "aten::addmm", "aten::native_dropout"))),
                phase=(Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)[3 * index // count],
                duration_s=draw(st.sampled_from((0.0, 1e-4, 1e-3, 2.5e-3, 1e-2))),
                reads=tuple(sorted(reads[index])),
                writes=tuple(sorted(writes[index])),
                scratch_bytes=draw(st.sampled_from((0, 0, 1000, 1 << 20))),
            )
            for index in range(count)
        ]
        return make_trace(
            steps,
            storages,
            (),
            static_bytes=draw(st.sampled_from((0, 1 << 20))),
            model="random",
            reach=Reach.TOUCHED,
            least_bytes=draw(st.sampled_from((0, 0, 4096, 256 << 10))),
        )

    return build()


def held_traces(*, max_ops: int = 30, max_storages: int = 20, max_held: int = 5) -> SearchStrategy[Trace]:
    """Return a strategy for traces as those of `traces`, with what the program holds from step to step beside them."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Trace:
        trace = draw(traces(max_ops=max_ops, max_storages=max_storages))
        count, first = len(trace.ops), len(trace.storages)
        operators = st.sets(st.integers(0, count - 1), max_size=4)
        touches = {first + k: (draw(operators), draw(operators)) for k in range(draw(st.integers(0, max_held)))}
        held = [
            Storage(
                nbytes=draw(st.sampled_from((1, 4096, 100_000, 1 << 20, 3 << 20))),
                kind=draw(st.sampled_from((*sorted(HELD_KINDS), Kind.INPUT))),
                first_op=-1,
                last_op=count,
            )
            for _ in touches
        ]
        held_bytes = sum(block.nbytes for block in held)
        ops = tuple(
            replace(
                op,
                peak_bytes=op.peak_bytes + held_bytes,
                reads=(*op.reads, *(storage for storage, (reads, _) in touches.items() if index in reads)),
                writes=(*op.writes, *(storage for storage, (_, writes) in touches.items() if index in writes)),
            )
            for index, op in enumerate(trace.ops)
        )
        return replace(
            trace,
            ops=ops,
            storages=(*trace.storages, *held),
            static_bytes=trace.static_bytes + held_bytes,
            reach=Reach.HELD,
            least_bytes=draw(st.sampled_from((0, 0, 4096))),
        )

    return build()


def links() -> SearchStrategy[Link]:
    """Return a strategy for links, from much slower than the random traces' compute to faster than it."""
    from hypothesis import strategies as st

    rate = st.sampled_from((5e7, 5e8, 2e9, 2e10))
    latency = st.sampled_from((0.0, 1e-4, 2e-3))
    return st.builds(
        Link,
        write_bytes_per_s=rate,
        read_bytes_per_s=rate,
        write_latency_s=latency,
        read_latency_s=latency,
        duplex=st.booleans(),
        idle_speedup=st.sampled_from((1.0, 2.5)),
    )


def slow_memory() -> SearchStrategy[Link]:
    """Return a strategy for tiers that operators read in place, from hardly slower than compute to much slower."""
    from hypothesis import strategies as st

    rate = st.sampled_from((5e8, 2e9, 2e10))
    access = st.builds(
        Access,
        read_bytes_per_s=rate,
        write_bytes_per_s=rate,
        mixed_share=st.sampled_from((1.0, 0.7)),
        latency_s=st.sampled_from((0.0, 1e-5)),
        own_channel=st.booleans(),
    )
    waited = st.none() | st.just(4e10)
    return st.builds(
        lambda link, access, write, read: replace(
            link, access=access, waited_write_bytes_per_s=write, waited_read_bytes_per_s=read
        ),
        links(),
        access,
        waited,
        waited,
    )


def problems(source: SearchStrategy[Trace] | None = None, *, can_recompute: bool = False) -> SearchStrategy[Problem]:
    """Return a strategy for problems whose budget some plan can meet: from the trace's floor to its peak."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Problem:
        trace = draw(source if source is not None else traces())
        budget_bytes = draw(st.integers(trace.floor_bytes(), max(trace.floor_bytes(), trace.peak_bytes)))
        return Problem(
            trace=trace,
            machine=machine_of(draw(links())),
            budget_bytes=budget_bytes,
            can_recompute=can_recompute,
        )

    return build()
