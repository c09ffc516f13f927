"""The options of a gap and their prices: one table, from which the sweep, the verifier's clock and the simulator price.

They stay three clocks: the table says what a thing costs by itself, a clock says when it happens beside all the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lowtide.core.machine import Link, Machine
from lowtide.core.plan import CodecCost, Problem
from lowtide.core.trace import Gap
from lowtide.errors import BadArgument


class Choice(StrEnum):
    """What can be done about a gap."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row: a choice, and what it costs by itself.

    `link_bytes` travel each way, in `write_s` and `read_s` of the link to `tier`. A swap of bytes that the tier already
    holds does not write, and one that does not come back does not read: which they are is said by the other decisions
    and the trace, not here. `encode_s` and `decode_s` are the codec's, beside the operators; `compute_s` is added
    to the step. `kept_bytes` stay in fast memory while the storage is away; `transient_bytes` are taken while it comes
    back, beside its own. `error_bound` is 0 where every bit comes back.
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
        self._swaps: dict[tuple[int, str, str], Option] = {}

    def of(self, gap: Gap, *, recipe: Sequence[int] | None = None) -> tuple[Option, ...]:
        """Return every row for a gap; `recipe`: the operators that would make its storage again, if any can."""
        nbytes = self._problem.trace.storages[gap.storage].nbytes
        rows = [self.keep(nbytes)]
        for tier in self._problem.tiers or (self._problem.tier,):
            rows += [self.swap(nbytes, tier=tier, codec=codec) for codec in self._codecs]
        if recipe is not None and self._problem.can_recompute:
            rows.append(self.recompute(gap, recipe))
        return tuple(rows)

    def keep(self, nbytes: int) -> Option:
        """Return the row of a storage that stays."""
        return Option(choice=Choice.KEEP, kept_bytes=nbytes)

    def swap(self, nbytes: int, *, tier: str, codec: str = "identity") -> Option:
        """Return the row of a storage that goes to a tier through a codec."""
        known = self._swaps.get((nbytes, tier, codec))
        if known is None:
            known = self._swaps[nbytes, tier, codec] = self._swap(nbytes, tier, self._codec(codec))
        return known

    def recompute(self, gap: Gap, ops: Sequence[int]) -> Option:
        """Return the row of a storage that operators make again."""
        trace = self._problem.trace
        made = {storage for op in ops for storage in trace.ops[op].writes if trace.storages[storage].first_op == op}
        return Option(
            choice=Choice.RECOMPUTE,
            compute_s=sum((trace.ops[op].duration_s for op in ops), start=0.0),
            transient_bytes=sum(trace.storages[storage].nbytes for storage in made - {gap.storage}),
        )

    def _swap(self, nbytes: int, tier: str, codec: CodecCost) -> Option:
        link = link_to(self._problem.machine, tier)
        link_bytes = nbytes if codec.ratio == 1 else round(nbytes * codec.ratio)
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
