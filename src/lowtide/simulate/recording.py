"""What a simulated step leaves behind: spans, the memory curve, traffic, and the blocks an allocator would see."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

from lowtide.core.plan import Plan, Problem
from lowtide.core.timeline import Lane, Span, Timeline
from lowtide.core.trace import Reach, Trace
from lowtide.core.units import format_bytes

Block = tuple[float, int, int]
"""A moment, bytes taken (positive) or given back (negative), and the number of the block."""
OwnedBlock = tuple[float, int, int, int]
"""The same, and what the block is for: a storage, with n of them n + i for what operator i needs beside, or -1."""


class Recording:
    """Collects what happens, in any order of time, and makes a `Timeline` of it.

    `watch_s` is what an operator takes longer than the trace says, because the step is watched. Moments are given on
    the clock of all steps; the timeline's begin with the step, at `begun_s`, with some storages `away`. `slow_s` is
    the time that operators take longer with operands in slow memory; storages of `elsewhere` are allocated there.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        watch_s: float = 0.0,
        begun_s: float = 0.0,
        away: Sequence[int] = (),
        slow_s: float = 0.0,
        elsewhere: Collection[int] = (),
    ) -> None:
        self._trace = trace
        self._slow_s = slow_s
        self._elsewhere = frozenset(elsewhere)
        self._tiers: dict[str, list[tuple[float, int]]] = {}
        self._watch_s = watch_s
        self._begun_s = begun_s
        self._away = frozenset(away)
        self.spans: list[Span] = []
        self.memory: list[tuple[float, int]] = []
        self.peak_bytes = 0
        self.out_bytes = 0
        self.in_bytes = 0
        self.recompute_s = 0.0
        self.starts_s: list[float] = []
        self.absences: list[tuple[float, int, bool]] = []
        self.scratch: list[tuple[float, float, int]] = []

    def live(self, at_s: float, live_bytes: int) -> None:
        """Note how many bytes are alive from a moment on."""
        self.memory.append((at_s, live_bytes))
        self.peak_bytes = max(self.peak_bytes, live_bytes)

    def in_tier(self, at_s: float, tier: str, nbytes: int) -> None:
        """Note how many bytes a tier holds from a moment on."""
        self._tiers.setdefault(tier, []).append((at_s, nbytes))

    def span(
        self, lane: Lane, start_s: float, end_s: float, op: int, cause: str = "", storage: int | None = None
    ) -> None:
        """Note that an operator ran or waited."""
        self.spans.append(Span(lane=lane, start_s=start_s, end_s=end_s, op=op, storage=storage, cause=cause))

    def absent(self, at_s: float, storage: int, *, gone: bool) -> None:
        """Note that a storage's fast bytes were given up, or taken again."""
        self.absences.append((at_s, storage, gone))

    def blocks(self, end_s: float) -> list[Block]:
        """Return the step as the sequence of blocks taken and given back that an allocator would see."""
        return [block[:3] for block in self.owned_blocks(end_s)]

    def owned_blocks(self, end_s: float) -> list[OwnedBlock]:
        """Return the blocks that are taken and given back, with what each is for.

        Storages keep their number from one absence to the next, but take a new block each time. What the trace knows
        of an operator beside its storages is one more block, taken and given back with it.
        """
        absences = [absence for absence in self.absences if absence[1] not in self._elsewhere]
        return _blocks(
            self._trace,
            self.starts_s,
            absences,
            self.scratch,
            end_s,
            away=self._away - self._elsewhere,
            elsewhere=self._elsewhere,
        )

    def _since(self, span: Span) -> Span:
        if not self._begun_s:
            return span
        return replace(span, start_s=span.start_s - self._begun_s, end_s=span.end_s - self._begun_s)

    def timeline(
        self, problem: Problem, plan: Plan | None, *, policy: str, step_s: float, allocator: str | None
    ) -> Timeline:
        """Return the step that was recorded."""
        compute_s = sum(op.duration_s + self._watch_s for op in self._trace.ops)
        notes = list(plan.notes) if plan is not None else ["no plan: victims are chosen when memory runs out"]
        reserved_bytes = self.peak_bytes
        if allocator is not None:
            from lowtide.estimate.predictors.allocators import reserved_peak

            reserved_bytes = reserved_peak(self.blocks(self._begun_s + step_s), allocator)
            if reserved_bytes > problem.budget_bytes:
                notes.append(
                    f"the {allocator} allocator reserves {format_bytes(reserved_bytes)}, "
                    f"{format_bytes(reserved_bytes - problem.budget_bytes)} more than the budget"
                )
        elif plan is not None and plan.layout:
            from lowtide.simulate.arena import follow

            followed = follow(self.owned_blocks(self._begun_s + step_s), plan.layout)
            reserved_bytes = followed.reserved_bytes
            notes.append(
                f"{followed.placed} blocks lay where the plan has them, {followed.displaced} found others there: "
                f"{format_bytes(reserved_bytes)} of addresses"
            )
        return Timeline(
            policy=policy,
            machine=problem.machine.name,
            model=problem.trace.model,
            budget_bytes=problem.budget_bytes,
            step_s=step_s,
            compute_s=compute_s,
            recompute_s=self.recompute_s,
            stall_s=max(0.0, step_s - compute_s - self._slow_s - self.recompute_s),
            slow_s=self._slow_s,
            tiers={
                tier: tuple((max(0.0, at_s - self._begun_s), nbytes) for at_s, nbytes in curve)
                for tier, curve in self._tiers.items()
            },
            peak_bytes=self.peak_bytes,
            reserved_peak_bytes=reserved_bytes,
            moved_out_bytes=self.out_bytes,
            moved_in_bytes=self.in_bytes,
            spans=tuple(sorted(map(self._since, self.spans), key=lambda span: (span.start_s, span.end_s))),
            memory=tuple(
                sorted(((at_s - self._begun_s, live) for at_s, live in self.memory), key=lambda moment: moment[0])
            ),
            notes=tuple(notes),
            trials=plan.trials if plan is not None else 0,
        )


def _blocks(
    trace: Trace,
    starts_s: Sequence[float],
    absences: Sequence[tuple[float, int, bool]],
    scratch: Sequence[tuple[float, float, int]],
    end_s: float,
    *,
    away: Collection[int],
    elsewhere: Collection[int] = (),
) -> list[OwnedBlock]:
    """Return all changes in the order of time; at one moment, what is given back goes first."""
    changes: list[tuple[float, int, int, int]] = []  # time, rank, storage, bytes
    static_bytes = trace.static_bytes
    for storage in _movable_before(trace, absences, away):
        static_bytes -= trace.storages[storage].nbytes
        if storage not in away:
            changes.append((starts_s[0], 2, storage, trace.storages[storage].nbytes))
    ends_s = [*starts_s[1:], end_s]
    alive = [0] * (len(trace.ops) + 2)
    for storage, block in enumerate(trace.storages):
        if block.first_op < 0 or not block.nbytes or storage in elsewhere:
            continue  # those that were there before the step are part of the static bytes
        changes.append((starts_s[block.first_op], 2, storage, block.nbytes))
        if block.last_op < len(trace.ops):
            changes.append((ends_s[block.last_op], 0, storage, -block.nbytes))
        alive[block.first_op] += block.nbytes
        alive[min(block.last_op, len(trace.ops)) + 1] -= block.nbytes
    missing, own = _without_heirs(trace, starts_s, absences, away=away)
    for at_s, storage, gone in own:
        nbytes = trace.storages[storage].nbytes
        # What the step found and frees is not among the static bytes: operators have it as a part of their own.
        found = trace.storages[storage].first_op < 0 and not trace.lives_on(storage)
        if nbytes and not (found and trace.reach is Reach.TOUCHED):
            changes.append((at_s, 1 if gone else 2, storage, -nbytes if gone else nbytes))
    other = len(trace.storages)
    live_bytes = 0
    for op, step in enumerate(trace.ops):
        live_bytes += alive[op]
        scratch_bytes = step.peak_bytes - trace.static_bytes - live_bytes - missing[op]
        if scratch_bytes > 0:
            changes.append((starts_s[op], 3, other + op, scratch_bytes))
            changes.append((ends_s[op], 0, other + op, -scratch_bytes))
    for start_s, stop_s, nbytes in scratch:
        other += 1
        changes.append((start_s, 3, len(trace.ops) + other, nbytes))
        changes.append((stop_s, 0, len(trace.ops) + other, -nbytes))
    return _numbered(sorted(changes, key=lambda change: change[:2]), static_bytes=static_bytes)


def _without_heirs(
    trace: Trace, starts_s: Sequence[float], absences: Sequence[tuple[float, int, bool]], *, away: Collection[int]
) -> tuple[list[int], list[tuple[float, int, bool]]]:
    """Return the bytes of heirs that are away at each operator, and the absences that are not those of heirs.

    Until it is freed, what the step before has left is an heir's: a part of its operators, as all that the step found.
    """
    heirs = trace.heirs()
    moments: dict[int, list[tuple[float, bool]]] = {storage: [(-inf, True)] for storage in away if storage in heirs}
    own = []
    for at_s, storage, gone in absences:
        if storage in heirs and at_s < starts_s[trace.storages[storage].first_op]:
            moments.setdefault(storage, []).append((at_s, gone))
        else:
            own.append((at_s, storage, gone))
    missing = [0] * len(trace.ops)
    for storage, of_heir in moments.items():
        for op in range(trace.storages[heirs[storage]].last_op + 1):
            if [gone for at_s, gone in sorted(of_heir) if at_s <= starts_s[op]][-1:] == [True]:
                missing[op] += trace.storages[storage].nbytes
    return missing, own


def _movable_before(trace: Trace, absences: Sequence[tuple[float, int, bool]], away: Collection[int]) -> list[int]:
    """Return what was there before the step and leaves: blocks of their own, where everything can leave."""
    if not trace.repeats:
        return []
    moved = {storage for _, storage, _ in absences}.union(away)
    return sorted(one for one in moved if trace.lives_on(one) and trace.storages[one].nbytes)


def _numbered(changes: Sequence[tuple[float, int, int, int]], *, static_bytes: int) -> list[OwnedBlock]:
    blocks: list[OwnedBlock] = [(0.0, static_bytes, 0, -1)] if static_bytes else []
    number = 0
    held: dict[int, int] = {}
    for at_s, _, storage, nbytes in changes:
        if nbytes > 0 and storage not in held:
            number += 1
            held[storage] = number
            blocks.append((at_s, nbytes, number, storage))
        elif nbytes < 0 and storage in held:
            blocks.append((at_s, nbytes, held.pop(storage), storage))
    return blocks
