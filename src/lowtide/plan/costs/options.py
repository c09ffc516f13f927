"""The options of a gap and their prices: one table, from which the sweep, the verifier's clock and the simulator price.

They stay three clocks: the table says what a thing costs by itself, a clock says when it happens beside all the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lowtide.core.machine import Link, Machine
from lowtide.core.plan import IDENTITY, CodecCost, Place, Problem, Swap
from lowtide.core.trace import Gap
from lowtide.errors import BadArgument
from lowtide.plan.costs.operator_times import OperatorTimes


class Choice(StrEnum):
    """What can be done about a gap."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"
    PLACE = "place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row: a choice, and what it costs by itself.

    `link_bytes` travel each way, in `write_s` and `read_s` of the link to `tier`. A swap of bytes that the tier already
    holds does not write, and one that does not come back does not read: which they are is said by the other decisions
    and the trace, not here. `encode_s` and `decode_s` are the codec's, beside the operators; `compute_s` is added
    to the step: by operators that run again, or that take longer with an operand in slow memory. `kept_bytes` stay in
    fast memory while the storage is away; `transient_bytes` are taken while it comes back, beside its own.
    `error_bound` is 0 where every bit comes back.
    """

    choice: Choice
    tier: str = ""
    codec: str = "identity"
    link_bytes: int = 0
    write_s: float = 0.0
    read_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    compute_s: float = 0.0
    kept_bytes: int = 0
    transient_bytes: int = 0
    error_bound: float = 0.0


def link_to(machine: Machine, tier: str) -> Link:
    """Return the link to a tier."""
    link = machine.links.get(tier)
    if link is None:
        known = ", ".join(sorted(machine.links)) or "none"
        raise BadArgument(f"machine {machine.name!r} has no tier {tier!r}: its tiers are {known}")
    return link


class Options:
    """The table of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._codecs = {codec.name: codec for codec in problem.codecs}
        self._sampled = {(one.storage, one.codec): one.ratio for one in problem.sampled}
        self._swaps: dict[tuple[int, str, str, float], Option] = {}
        self._times = OperatorTimes(problem)

    def of(self, gap: Gap, *, recipe: Sequence[int] | None = None) -> tuple[Option, ...]:
        """Return every row for a gap; `recipe`: the operators that would make its storage again, if any can."""
        nbytes = self._problem.trace.storages[gap.storage].nbytes
        rows = [self.keep(nbytes)]
        for tier in self._problem.tiers or (self._problem.tier,):
            in_place = tier in self._problem.addressable()
            rows += [
                self.swap(nbytes, tier=tier, codec=codec, storage=gap.storage)
                for codec in self._codecs
                if codec == IDENTITY.name or not in_place
            ]
        if recipe is not None and self._problem.can_recompute:
            rows.append(self.recompute(gap, recipe))
        rows += [self.stay(gap, tier=tier) for tier in self._problem.addressable()]
        return tuple(rows)

    def keep(self, nbytes: int) -> Option:
        """Return the row of a storage that stays."""
        return Option(choice=Choice.KEEP, kept_bytes=nbytes)

    def swap(self, nbytes: int, *, tier: str, codec: str = "identity", storage: int | None = None) -> Option:
        """Return the row of a storage that goes to a tier through a codec; what that leaves of it may be sampled."""
        cost = self._codec(codec)
        ratio = cost.ratio if storage is None else self._sampled.get((storage, codec), cost.ratio)
        known = self._swaps.get((nbytes, tier, codec, ratio))
        if known is None:
            known = self._swaps[nbytes, tier, codec, ratio] = self._swap(nbytes, tier, cost, ratio)
        return known

    def stay(self, gap: Gap, *, tier: str) -> Option:
        """Return the row of a storage that is in a tier all through a gap, and is touched there at its end."""
        index = gap.before_op % len(self._problem.trace.ops)
        there = {gap.storage: (tier, self._problem.trace.storages[gap.storage].nbytes)}
        fast_s = self._problem.trace.ops[index].duration_s
        return Option(choice=Choice.PLACE, tier=tier, compute_s=self._times.of(index, there) - fast_s)

    def places(self, places: Sequence[Place]) -> list[Option]:
        """Return the row of each place: what its migrations cost, out and back.

        Pages travel whole. Of those that move as one run the first pays what the run costs but their own bytes: the
        rest of the last page, and the latency.
        """
        runs: dict[tuple[object, ...], list[int]] = {}
        for k, place in enumerate(places):
            alike = (place.tier, place.from_op, place.until_op, place.asked_op, place.landed_op)
            runs.setdefault((*alike, *(("alone", k) if place.run is None else ("run", place.run))), []).append(k)
        rows: list[Option | None] = [None] * len(places)
        for run in runs.values():
            run.sort(key=lambda k: places[k].storage)
            sizes = [self.placed_bytes(places[k]) for k in run]
            page = link_to(self._problem.machine, places[run[0]].tier).page_bytes
            padding = -sum(sizes) % page
            for position, (k, nbytes) in enumerate(zip(run, sizes, strict=True)):
                rows[k] = self._migration(places[k], nbytes + (0 if position else padding), with_latency=position == 0)
        return [row for row in rows if row is not None]

    def placed_bytes(self, place: Place) -> int:
        """Return how many bytes of its storage a place is about."""
        return self._problem.trace.storages[place.storage].nbytes if place.nbytes is None else place.nbytes

    def _migration(self, place: Place, nbytes: int, *, with_latency: bool) -> Option:
        link = link_to(self._problem.machine, place.tier)
        return Option(
            choice=Choice.PLACE,
            tier=place.tier,
            link_bytes=nbytes,
            write_s=link.write_s(nbytes, waited=place.landed_op == place.from_op)
            - (0.0 if with_latency else link.write_latency_s),
            read_s=link.read_s(nbytes, waited=place.asked_op == place.until_op)
            - (0.0 if with_latency else link.read_latency_s),
        )

    def drag_s(self, swaps: Iterable[Swap]) -> float:
        """Return how much longer a step's operators take because codecs work beside them."""
        drag, storages = self._problem.codec_drag, self._problem.trace.storages
        if not drag:
            return 0.0
        rows = (
            self.swap(storages[one.gap.storage].nbytes, tier=one.tier, codec=one.codec, storage=one.gap.storage)
            for one in swaps
            if one.codec != IDENTITY.name
        )
        return drag * sum(row.encode_s + row.decode_s for row in rows)

    def recompute(self, gap: Gap, ops: Sequence[int]) -> Option:
        """Return the row of a storage that operators make again."""
        trace = self._problem.trace
        made = {storage for op in ops for storage in trace.ops[op].writes if trace.storages[storage].first_op == op}
        return Option(
            choice=Choice.RECOMPUTE,
            compute_s=sum((trace.ops[op].duration_s for op in ops), start=0.0),
            transient_bytes=sum(trace.storages[storage].nbytes for storage in made - {gap.storage}),
        )

    def _swap(self, nbytes: int, tier: str, codec: CodecCost, ratio: float) -> Option:
        link = link_to(self._problem.machine, tier)
        link_bytes = nbytes if ratio == 1 else round(nbytes * ratio)
        return Option(
            choice=Choice.SWAP,
            tier=tier,
            codec=codec.name,
            link_bytes=link_bytes,
            write_s=link.write_s(link_bytes),
            read_s=link.read_s(link_bytes),
            encode_s=nbytes / codec.encode_bytes_per_s,
            decode_s=nbytes / codec.decode_bytes_per_s,
            error_bound=codec.error_bound,
        )

    def _codec(self, name: str) -> CodecCost:
        codec = self._codecs.get(name)
        if codec is None:
            known = ", ".join(sorted(self._codecs)) or "none"
            raise BadArgument(
                f"the rate of codec {name!r} is not known: give it in Problem(codecs=...); known: {known}"
            )
        return codec
