"""FlashNeuron: offload tensors of the forward pass in order until enough has left (Bae et al., FAST 2021).

Symbols: start_i, when tensor i is made; T_i, its transfer: bytes over the write bandwidth, half of that if it is stored
in half precision, and half if it is stored without its zeros (CSR).

    need = bytes of all saved tensors - 0.6 * free memory
    Phase 1: take tensors of more than 1 MB in the order of the forward pass until the need is covered. A transfer
             begins when the one before it is over; the choice times out if the last one ends after the forward pass.
    Phase 2: while it times out, leave out the last tensor chosen that is not compressible (then one that is not CSR)
             and take later CSR tensors (then half precision ones) until they make up for its bytes.
             If the need is still not covered, take any CSR tensor, then any in half precision, then any.

Phase 2 prefers a late CSR tensor to an early one in half precision, and the next one to a smaller one: it may time out
though some set of compressible tensors would not. `complete=True` looks for such a set then; the paper does not.

The backward pass asks for everything at once, in the order of its use; each comes as soon as there is space.

Memory is one pool with two ends: what stays is placed from the low end, what leaves from the high end.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lowtide.core.plan import IDENTITY, Plan, Problem, Swap
from lowtide.core.trace import Gap, Phase, Trace
from lowtide.core.units import format_bytes, format_seconds
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.sweep import Sweep, link_of
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.views.layers import crossing_gaps, relu_results

# The paper's share of the free memory that is left to saved tensors, and what follows where that does not fit.
FREE_SHARES = (0.6, 0.4, 0.2, 0.0)
LEAST_BYTES = 1 << 20
# 1 MB is little beside the gigabytes of the paper: a smaller step gets a smaller threshold.
LEAST_SHARE = 1e-3
# What ReLU outputs go through, if the executor has it.
SPARSE_CODECS = ("ssdc", "zvc")
# Networks have few different sizes, and sets of them few different sums; this is for those that do not.
MOST_SETS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the forward pass that could be offloaded: from when on, and how it could be stored."""

    gap: Gap
    nbytes: int
    start_s: float
    csr: bool = False
    fp16: bool = False

    def transfer_s(self, write_bytes_per_s: float) -> float:
        """Return T, how long it takes to write the tensor."""
        return self.nbytes / write_bytes_per_s / (2 if self.fp16 else 1) / (2 if self.csr else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The tensors chosen, in forward order; `timed_out` if the last one lands after the forward pass."""

    tensors: tuple[Tensor, ...]
    end_s: float
    timed_out: bool


def select(
    tensors: Sequence[Tensor],
    *,
    need_bytes: int,
    write_bytes_per_s: float,
    forward_end_s: float,
    complete: bool = False,
) -> Selection:
    """Return the tensors that both phases choose from those of the forward pass.

    If they time out and `complete` is set: a set of compressible tensors that covers the need in time, if there is one.
    """
    found = _phases(tensors, need_bytes=need_bytes, write_bytes_per_s=write_bytes_per_s, forward_end_s=forward_end_s)
    if complete and found.timed_out:
        compressible = sorted((one for one in tensors if one.csr or one.fp16), key=_in_order)
        chosen = in_time(compressible, need_bytes, write_bytes_per_s=write_bytes_per_s, forward_end_s=forward_end_s)
        if chosen is not None:
            end_s = last_landing_s(chosen, write_bytes_per_s=write_bytes_per_s)
            return Selection(tensors=chosen, end_s=end_s, timed_out=False)
    return found


def _phases(tensors: Sequence[Tensor], *, need_bytes: int, write_bytes_per_s: float, forward_end_s: float) -> Selection:

    def judged(chosen: Iterable[Tensor]) -> Selection:
        ordered = tuple(sorted(chosen, key=_in_order))
        end_s = last_landing_s(ordered, write_bytes_per_s=write_bytes_per_s)
        return Selection(tensors=ordered, end_s=end_s, timed_out=end_s > forward_end_s)

    ordered = sorted(tensors, key=_in_order)
    chosen: list[Tensor] = []
    for tensor in ordered:
        if need_bytes <= 0:
            break
        chosen.append(tensor)
        need_bytes -= tensor.nbytes
    found = judged(chosen)
    rest = ordered[len(chosen) :]
    # Without compressible tensors there is nothing to trade for: memory comes before time.
    while found.timed_out and any(one.csr or one.fp16 for one in ordered):
        outgoing = next((one for one in reversed(chosen) if not one.csr and not one.fp16), None)
        outgoing = outgoing or next((one for one in reversed(chosen) if not one.csr), None)
        if outgoing is None:
            break
        chosen.remove(outgoing)
        need_bytes += outgoing.nbytes
        need_bytes -= _fill(chosen, rest, need_bytes)  # not the deleted bytes: phase 1 may have taken more than needed
        found = judged(chosen)
    left = [one for one in ordered if one not in chosen]
    if need_bytes > 0 and left:
        need_bytes -= _fill(chosen, left, need_bytes)
        for tensor in left:
            if need_bytes > 0:
                chosen.append(tensor)
                need_bytes -= tensor.nbytes
        found = judged(chosen)
    return found


def _in_order(tensor: Tensor) -> tuple[float, Gap]:
    return tensor.start_s, tensor.gap


def _fill(chosen: list[Tensor], rest: list[Tensor], need_bytes: int) -> int:
    """Move compressible tensors from the rest to the chosen until they cover the need; return their bytes."""
    moved = 0
    compressible = [one for one in rest if one.csr] + [one for one in rest if one.fp16 and not one.csr]
    for tensor in compressible:
        if moved >= need_bytes:
            break
        rest.remove(tensor)
        chosen.append(tensor)
        moved += tensor.nbytes
    return moved


def last_landing_s(tensors: Iterable[Tensor], *, write_bytes_per_s: float) -> float:
    """Return when the last write lands if each waits for the one before it."""
    free_s = 0.0
    for tensor in tensors:
        free_s = max(free_s, tensor.start_s) + tensor.transfer_s(write_bytes_per_s)
    return free_s


def in_time(
    tensors: Sequence[Tensor], need_bytes: int, *, write_bytes_per_s: float, forward_end_s: float
) -> tuple[Tensor, ...] | None:
    """Return tensors that cover the need and land in time, or None if no set of them does.

    Of two sets of the tensors so far, one that lands no later and has no fewer bytes is as good for all that follows:
    only the others are kept, by when they land. None, too, if more than `MOST_SETS` would have to be kept.
    """
    front: list[tuple[float, int, tuple[Tensor, ...]]] = [(0.0, 0, ())]
    for tensor in tensors:
        transfer_s = tensor.transfer_s(write_bytes_per_s)
        grown = [
            (max(end_s, tensor.start_s) + transfer_s, nbytes + tensor.nbytes, (*chosen, tensor))
            for end_s, nbytes, chosen in front
            if nbytes < need_bytes
        ]
        candidates, front = sorted([*front, *grown], key=lambda one: (one[0], -one[1])), []
        for one in candidates:
            if one[0] <= forward_end_s and (not front or one[1] > front[-1][1]):
                front.append(one)
        if len(front) > MOST_SETS:
            return None
    return front[-1][2] if front[-1][1] >= need_bytes else None


class FlashNeuron:
    """Offloads in forward order until the rest fits.

    `csr` and `fp16` let the selection count on compression of ReLU outputs, and of everything. ReLU outputs then go
    through `ssdc`, which is CSR, or `zvc`, whichever the executor has first; half precision is a model, since what is
    trained with here stays the same to the bit. `complete`: see above.
    """

    name = "flashneuron"
    summary = "FlashNeuron: offloads in forward order until the rest fits, fetches as soon as there is space"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and drive", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Bae et al., FAST 2021",
        reconstructed=(
            "the share of 0.6 is lowered where the choice does not fit, and memory comes before time; compression "
            "counts in the selection when switched on, and without it there is no phase 2; zeros are left out by the "
            "codec ssdc or zvc, half precision is a model; the tier is a file, not a device that the accelerator "
            "reaches by itself"
        ),
    )

    def __init__(self, *, csr: bool = False, fp16: bool = False, complete: bool = False) -> None:
        self._csr = csr
        self._fp16 = fp16
        self._complete = complete

    def plan(self, problem: Problem) -> Plan:
        """Return the offloads of the first share of free memory with which the step fits."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        facts = Sweep(problem)
        for found in self._ladder(problem):
            swaps = _swaps(problem, found.tensors)
            if not facts.run(swaps).over:
                break
        moved_bytes = sum(one.nbytes for one in found.tensors)
        notes = [f"offloads {len(swaps)} tensors, {format_bytes(moved_bytes)}"]
        if found.timed_out:
            late_s = found.end_s - _forward_end_s(problem.trace)
            notes.append(f"the last one lands {format_seconds(late_s)} after the forward pass")
        return compose(self.name, problem, swaps, notes=notes)

    def _ladder(self, problem: Problem) -> Iterator[Selection]:
        """Yield selections that leave less and less of the free memory to saved tensors, then with small ones too."""
        tensors = tensors_of(problem.trace, csr=self._csr, fp16=self._fp16)
        free_bytes = max(0, problem.budget_bytes - problem.trace.static_bytes)
        for least_bytes in (min(LEAST_BYTES, LEAST_SHARE * problem.trace.peak_bytes), 0):
            large = [one for one in tensors if one.nbytes > least_bytes]
            total_bytes = sum(one.nbytes for one in large)
            for share in FREE_SHARES:
                yield select(
                    large,
                    need_bytes=total_bytes - int(share * free_bytes),
                    write_bytes_per_s=link_of(problem).write_bytes_per_s,
                    forward_end_s=_forward_end_s(problem.trace),
                    complete=self._complete,
                )


def tensors_of(trace: Trace, *, csr: bool, fp16: bool) -> list[Tensor]:
    """Return what the forward pass leaves for the backward pass; ReLU's results are the ones with zeros."""
    zeros = relu_results(trace)
    starts = [*(op.start_s for op in trace.ops), trace.duration_s]
    return [
        Tensor(
            gap=gap,
            nbytes=trace.storages[gap.storage].nbytes,
            start_s=starts[gap.after_op],
            csr=csr and gap.storage in zeros,
            fp16=fp16,
        )
        for gap in sorted(crossing_gaps(trace).values())
        if trace.storages[gap.storage].nbytes
    ]


def _first_backward_op(trace: Trace) -> int:
    return next((index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD), len(trace.ops))


def _forward_end_s(trace: Trace) -> float:
    first = _first_backward_op(trace)
    return trace.ops[first].start_s if first < len(trace.ops) else trace.duration_s


def _swaps(problem: Problem, tensors: Iterable[Tensor]) -> tuple[Swap, ...]:
    first = _first_backward_op(problem.trace)
    known = {codec.name for codec in problem.codecs}
    sparse = next((name for name in SPARSE_CODECS if name in known), IDENTITY.name)
    return tuple(
        Swap(
            gap=one.gap,
            fetch_op=min(max(first, one.gap.after_op + 1), one.gap.before_op),
            tier=problem.tier,
            codec=sparse if one.csr else IDENTITY.name,
        )
        for one in sorted(tensors, key=lambda one: one.gap)
    )


class TwoEndedPool:
    """Places blocks by first fit in a pool of fixed size: from the low end, or from the high one.

    What leaves early is kept apart from what stays, so that its space is one piece when it is gone.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._taken: list[tuple[int, int]] = []
        self._of: dict[int, tuple[int, int]] = {}

    def allocate(self, block: int, nbytes: int, *, high: bool = False) -> int | None:
        """Return the address of a block (None: no hole is large enough)."""
        holes = self._holes()
        for begin, end in reversed(holes) if high else holes:
            if end - begin >= nbytes:
                address = end - nbytes if high else begin
                self._of[block] = (address, address + nbytes)
                insort(self._taken, self._of[block])
                return address
        return None

    def free(self, block: int) -> None:
        """Give a block back."""
        self._taken.remove(self._of.pop(block))

    def fragmentation(self) -> float:
        """Return the external fragmentation: the share of the free bytes that is not in the largest hole."""
        holes = [end - begin for begin, end in self._holes()]
        return 1 - max(holes) / sum(holes) if sum(holes) else 0.0

    def _holes(self) -> list[tuple[int, int]]:
        edges = [0, *(edge for span in self._taken for edge in span), self._capacity_bytes]
        return [(edges[k], edges[k + 1]) for k in range(0, len(edges), 2) if edges[k] < edges[k + 1]]
