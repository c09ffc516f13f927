"""One step on a virtual clock: operators, waits, transfers and recomputation, decided by the residency machine.

The rules are those of docs/policies.md, which plans are judged by; docs/simulator.md says what is added to them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem
from lowtide.core.timeline import Lane, Timeline
from lowtide.errors import BudgetTooSmall
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.operator_times import OperatorTimes
from lowtide.plan.costs.options import Options
from lowtide.plan.policy import Policy
from lowtide.plan.victims import victims_of
from lowtide.residency import events as e
from lowtide.residency.machine import Residency
from lowtide.simulate.agenda import Agenda, Moment, Record
from lowtide.simulate.equations import Equations
from lowtide.simulate.recording import Recording
from lowtide.simulate.remake import Recipe, Remaker, planned_peaks
from lowtide.simulate.resources import Resources
from lowtide.simulate.state import State
from lowtide.simulate.traffic import Traffic
from lowtide.simulate.view import DiscardingView, SimulatedView
from lowtide.simulate.waits import Wait, shortened


def simulate(
    problem: Problem,
    plan: Plan | None,
    *,
    policy: Policy | None = None,
    allocator: str | None = None,
    resources: Resources | None = None,
    strict: bool = False,
) -> Timeline:
    """Return the step of `problem` under a plan (None: no plan, and no knowledge of what comes).

    Where pages move, that is the second of two steps: one that follows another of its kind.

    `policy` chooses victims where memory still runs out; those of a policy that `discards_victims` are discarded
    and made again. `allocator` names a model of `lowtide.estimate.predictors.allocators` for `reserved_peak_bytes`.
    `strict` checks the survey's equations after every event. Raises `BudgetTooSmall` where an operator does not fit.
    """
    return _Steps(problem, plan, policy=policy, resources=resources or Resources(), strict=strict).run(allocator)


def _waited_link(problem: Problem, plan: Plan | None) -> Link | None:
    """Return the link on which everything goes faster while the program waits (None: not everything does)."""
    link = problem.machine.links.get(problem.tier)
    ways = {(swap.tier, swap.codec) for swap in plan.swaps} if plan is not None else set()
    if plan is not None:
        ways |= {(place.tier, "identity") for place in plan.places}
    if link is None or link.idle_speedup == 1 or not ways <= {(problem.tier, "identity")}:
        return None
    return link


class _Steps:
    def __init__(
        self, problem: Problem, plan: Plan | None, *, policy: Policy | None, resources: Resources, strict: bool
    ) -> None:
        trace = problem.trace
        self.problem = problem
        self.plan = plan
        self.policy = policy
        self.ops = trace.ops
        self.pages = trace.repeats
        self.steps = 2 if self.pages else 1
        self.agenda = Agenda(problem, plan, steps=self.steps)
        self.records = self.agenda.records
        self.touches = trace.touches() if self.pages else ()
        self.changes = [set(op.writes) for op in self.ops]
        for storage, ops in enumerate(trace.changes()):
            for op in ops:
                self.changes[op].add(storage)
        self.parent = {heir: storage for storage, heir in trace.heirs().items()}
        self.discards = problem.can_recompute and policy is not None and policy.about.discards_victims
        remakes = self.discards or any(trip.ops is not None for trip in self.agenda.trips)
        self.remaker = Remaker(trace, self.records) if remakes else None
        drag_s = Options(problem).drag_s(plan.swaps) if plan is not None else 0.0
        self.watch_s = ((problem.watch_s if remakes else 0.0) + drag_s) / max(1, len(self.ops))
        places = plan.places if plan is not None else ()
        self.duration_s = OperatorTimes(problem).all(places) if places else [op.duration_s for op in self.ops]
        self.recording = self._new_recording(begun_s=0.0)
        peak_bytes = planned_peaks(problem, plan)
        self.state = State(
            problem,
            peak_bytes=peak_bytes * self.steps,
            machine=Residency(self._victims, discards=self.discards, pages=self.pages),
            recording=self.recording,
            equations=Equations(trace, problem.budget_bytes, self._sizes()) if strict else None,
        )
        self.waits: list[Wait] = []
        self.begun_s = 0.0
        self.waited_link = _waited_link(problem, plan)
        prefetches = any(moment.fetching for moment in self.agenda.moments.values())
        ahead = self.agenda.least_bytes(peak_bytes) * (self.steps + 1 if self.pages else 1) if prefetches else None
        self.traffic = Traffic(self.state, problem, resources, committed=Curve(ahead) if ahead is not None else None)
        self.view = (
            DiscardingView(self.state, self.records, self.remaker)
            if self.discards and self.remaker is not None
            else SimulatedView(self.state, self.records, None)
        )
        self.state.machine.follow(swapped=frozenset(), uses=self.agenda.uses if plan is not None else {})

    def _new_recording(self, *, begun_s: float) -> Recording:
        return Recording(
            self.problem.trace,
            watch_s=self.watch_s,
            begun_s=begun_s,
            away=[record.storage for record in self.records.values() if record.away],
            slow_s=sum(self.duration_s) - sum(op.duration_s for op in self.ops),
            elsewhere=[trip.record.storage for trip in self.agenda.trips if trip.born],
        )

    def _sizes(self) -> dict[int, int]:
        return {storage: record.nbytes for storage, record in self.records.items()}

    def _victims(self, _: Residency, need_bytes: int) -> Iterator[int]:
        return victims_of(self.policy, self.view, need_bytes) if self.policy is not None else iter(())

    # ---- the step ----

    def run(self, allocator: str | None) -> Timeline:
        """Run all operators, of as many steps as it takes, and return what happened in the last."""
        if self.pages:
            self._begin_among_others()
        clock_s = self._step(0, 0.0)
        if self.steps > 1:
            self.begun_s = clock_s
            self.waits = []
            self.recording = self.state.recording = self._new_recording(begun_s=clock_s)
            for tier, nbytes in self.state.tier_bytes.items():
                self.recording.in_tier(clock_s, tier, nbytes)
            clock_s = self._step(len(self.ops), clock_s)
        self.traffic.drain()
        policy = self.plan.policy if self.plan is not None else self.policy.name if self.policy is not None else ""
        timeline = self.recording.timeline(
            self.problem, self.plan, policy=policy, step_s=clock_s - self.begun_s, allocator=allocator
        )
        return shortened(timeline, self.waits)

    def _step(self, first_op: int, clock_s: float) -> float:
        """Run the operators of one step and return when it has ended."""
        for index, op in enumerate(self.ops):
            self.traffic.advance(clock_s)
            self.traffic.reach(clock_s)
            self.state.op = first_op + index
            moment = self.agenda.moments.get(index)
            self.state.waiting = True
            if self.state.equations is not None:
                self.state.equations.reach(index)
            if moment is not None:
                clock_s = self._enter(index, moment, clock_s)
            elif self.state.live_bytes() > self.state.budget_bytes:
                clock_s = self._make_room(clock_s)
            self.state.waiting = False
            self.state.note(clock_s)
            if self.state.equations is not None:
                used, in_place = (moment.used, moment.in_place) if moment is not None else ((), ())
                self.state.equations.begins(index, used, in_place=in_place)
            self.recording.starts_s.append(clock_s)
            end_s = clock_s + self.duration_s[index] + self.watch_s
            self.recording.span(Lane.COMPUTE, clock_s, end_s, index)
            clock_s = end_s
            if moment is not None:
                self._leave(index, moment, clock_s)
            if self.discards:
                self._touch((*op.reads, *op.writes), clock_s)
        if self.pages:
            # What has begun beside the last operator belongs to this step.
            self.traffic.advance(clock_s)
        return clock_s

    def _begin_among_others(self) -> None:
        """Take over what steps before the first have left behind: copies in tiers, absences and requests."""
        reaching = {trip.record.storage: trip for trip in self.agenda.over_the_end()}
        reaching |= {trip.record.storage: trip for trip in self.agenda.trips if trip.for_good}
        copies: dict[int, list[str]] = {}
        for storage, place in self.agenda.copies():
            copies.setdefault(storage, []).append(place)
        for storage, record in self.records.items():
            if not (record.lives_on or record.inherited):
                continue
            self.state.tell(e.Saved(storage, record.nbytes, storage))
            self.view.needed_next(storage, len(self.ops))
            trip = reaching.get(storage)
            away = trip.place if trip is not None else None
            for place in sorted(copies.get(storage, ()), key=lambda place: place == away):
                self.state.tell(e.Found(storage, place, place == away))
            if trip is not None:
                record.tier, record.codec, record.option = trip.tier, trip.codec, trip.option
                record.landed_s = 0.0
                self.state.waiting = True
                self.state.gone(record, 0.0)
                self.state.waiting = False
        for trip in self.agenda.over_the_end():
            if trip.returns and trip.fetch_op < len(self.ops) < trip.due_op:
                self.traffic.ask_prefetch(trip, 0.0, needed_op=trip.due_op - len(self.ops))

    def _enter(self, index: int, moment: Moment, clock_s: float) -> float:
        """Do what the start of an operator brings and wait for what it needs; return when it begins."""
        self._note_saves(moment.saved, moment.ticks, clock_s, by_autograd=True)
        self._start_trips(index, moment, clock_s)
        if moment.barred or moment.due or moment.ending:
            clock_s = self._wait_for_landings(index, moment, clock_s)
        if self.pages:
            self._release(moment.over)  # before the saves: what ended with the step before is the same storage in this
            self._note_saves(moment.saved, 0, clock_s, by_autograd=False)
            self._note_born(moment, clock_s)
        fetched, remade = self._need(moment)
        absent = [record for record in fetched if record.away]
        for record in absent:
            self.state.claim(record)
        recipe = self._recipe(index, remade)
        if recipe is not None:
            operands = [self.records[storage] for storage in recipe.fetched]
            for record in (*remade, *operands):
                self.state.claim(record)
            absent += operands
            fetched += operands
        if self.state.live_bytes() > self.state.budget_bytes:
            self.view.protected = self._operands(recipe)
            clock_s = self._make_room(clock_s)
            self.view.protected = set()
        # No prefetch has begun meanwhile: it would have taken what the operator was waiting for.
        self.traffic.reach(clock_s)
        ready_s = self._fetch(index, fetched, absent, clock_s) if fetched else clock_s
        if recipe is not None:
            ready_s = self._remake(recipe, remade, ready_s)
        for storage in moment.used:
            if not self.pages:
                self.state.tell(e.Used(storage))
            self.records[storage].touched_s = ready_s
        return ready_s

    def _leave(self, index: int, moment: Moment, clock_s: float) -> None:
        """Do what the end of an operator brings."""
        if self.pages:
            written = {self.parent.get(storage, storage) for storage in self.changes[index]}
            for storage in moment.used:
                commands = self.state.tell(e.Used(storage, wrote=storage in written))
                self._carry_out(commands, clock_s, cause="plan")
            for storage in moment.changed:
                self.state.tell(e.ChangedInPlace(storage))
        self._release(moment.gone)

    # ---- the start of an operator ----

    def _note_saves(self, storages: Iterable[int], ticks: int, clock_s: float, *, by_autograd: bool) -> None:
        """Take in storages that come to be, or that autograd has saved from here on."""
        machine = self.state.machine
        for storage in storages:
            record = self.records[storage]
            if record.saved is not by_autograd:
                continue
            record.touched_s = clock_s
            record.gone = False
            self.state.tell(e.Saved(storage, record.nbytes, storage))
            if self.pages:
                self.view.needed_next(storage, self._next_touch(storage, self.state.index - 1))
            if self.pages and record.saved:  # so far the program holds it as well
                self.state.tell(e.Held(storage))
                record.open, record.watched = False, True
        for _ in range(ticks):
            machine.tick()

    def _note_born(self, moment: Moment, clock_s: float) -> None:
        """Take in what is allocated in slow memory: fast memory never has it."""
        for trip in moment.born:
            record = trip.record
            record.tier, record.codec, record.option = trip.tier, trip.codec, trip.option
            record.landed_s = clock_s
            trip.read, trip.blocked_until_op = False, 0
            self.state.tell(e.Found(record.storage, trip.place, True))
            self.state.gone(record, clock_s)

    def _next_touch(self, storage: int, index: int) -> int:
        """Return the first operator after one that needs a range, or that releases it; the end if it is after that."""
        touched = self.touches[storage]
        after = bisect_right(touched, index)
        return touched[after] if after < len(touched) else self.problem.trace.storages[storage].last_op

    def _start_trips(self, index: int, moment: Moment, clock_s: float) -> None:
        for storage in moment.closing:
            self.records[storage].open = False
        for gap in moment.opening:
            record = self.records[gap.storage]
            record.open = True
            self.view.needed_next(gap.storage, gap.before_op)
            if record.watched:
                self._watch(record, clock_s, cause="plan")
        for trip in moment.leaving:
            trip.record.tier, trip.record.codec, trip.record.option = trip.tier, trip.codec, trip.option
            trip.read, trip.blocked_until_op = False, 0
            leave = e.Leave((trip.record.storage,), place=trip.place)
            self._carry_out(self.state.tell(leave), clock_s, cause="plan")
        for trip in moment.discarding:
            self._carry_out(self.state.tell(e.Forget((trip.record.storage,))), clock_s, cause="plan")
        for trip in moment.fetching:
            needed_op = self.state.op - index + trip.due_op
            if self.pages:
                due = trip.due_op % len(self.ops)
                needed_op = self.state.op - index + due + (len(self.ops) if due <= index else 0)
            self.traffic.ask_prefetch(trip, clock_s, needed_op=needed_op)

    def _wait_for_landings(self, index: int, moment: Moment, clock_s: float) -> float:
        """Wait for the writes that the operator is a barrier for, and for those of what is due back."""
        for trip in (*moment.barred, *moment.due):
            if trip.ops is None and trip.record.leaving:
                landed_s = self.traffic.land(trip.record, clock_s)
                self._stall(index, clock_s, landed_s, cause="landing", storage=trip.record.storage)
                clock_s = landed_s
        self.traffic.settle(clock_s)
        for trip in moment.due:
            trip.read = True
        for storage in moment.ending:
            self.state.released(self.records[storage])
        return clock_s

    def _need(self, moment: Moment) -> tuple[list[Record], list[Record]]:
        """Tell the machine what is needed now; return what is to be fetched (or is on its way) and what made again."""
        fetched: list[Record] = []
        remade: list[Record] = []
        for _ in range(moment.other_uses):
            self.state.machine.tick()
        if not moment.used and not moment.due:
            return fetched, remade
        used = set(moment.used)
        early = {trip.record.storage for trip in moment.due if trip.returns} - used
        for storage in sorted(used | early):
            record = self.records[storage]
            commands = self.state.tell(e.Needed(storage) if storage in used else e.Due((storage,)))
            if storage in used:
                self.state.machine.tick()
                if self.pages:
                    self.view.needed_next(storage, self._next_touch(storage, self.state.index))
            elif record.discarded:
                remade.append(record)
            elif record.arrives_s >= 0:
                fetched.append(record)
            for command in commands:
                match command:
                    case e.Fetch() | e.Prefetch():
                        fetched.append(record)
                    case e.Remake():
                        remade.append(record)
                    case e.Keep():
                        self.traffic.keep(record)
        return fetched, remade

    def _fetch(self, index: int, fetched: Sequence[Record], absent: Sequence[Record], clock_s: float) -> float:
        """Start the reads of what is absent; return when that and what was on its way have arrived."""
        ready_s = clock_s
        for record in fetched:
            arrives_s = record.arrives_s
            if record in absent:
                arrives_s = self.traffic.read_now(record, clock_s, cause="demand")
            self._stall(index, ready_s, arrives_s, cause="arrival", storage=record.storage)
            ready_s = max(ready_s, arrives_s)
        self.traffic.settle(ready_s)
        return ready_s

    # ---- making room ----

    def _make_room(self, clock_s: float) -> float:
        """Return when the running operator's bytes fit, after writes have landed and victims have gone."""
        state, begun_s = self.state, clock_s
        held_rounds = 0
        while (lacking_bytes := state.live_bytes() - state.budget_bytes) > 0:
            pressed = False
            if self.traffic.leaving_bytes < lacking_bytes:
                self.view.clock_s = clock_s
                pressed = self._carry_out(state.tell(e.Pressure(lacking_bytes)), clock_s, cause="pressure")
                if state.live_bytes() <= state.budget_bytes:
                    break
            change_s = self.traffic.next_change_s(clock_s)
            if change_s == inf:
                # The program may have held all of the victims: then others are asked for, while there are any.
                if pressed and held_rounds < len(self.records):
                    held_rounds += 1
                    continue
                raise BudgetTooSmall(
                    budget_bytes=state.budget_bytes,
                    needed_bytes=state.live_bytes(),
                    op=self.ops[state.index].name,
                    detail=f"operator {state.index} of the simulated step",
                )
            clock_s = change_s
            self.traffic.settle(clock_s)
        self._stall(state.index, begun_s, clock_s, cause="room")
        self.traffic.reach(clock_s)
        return clock_s

    def _carry_out(self, commands: Iterable[e.Command], clock_s: float, *, cause: str) -> bool:
        """Do what the machine commands; return whether that changed anything."""
        changed = False
        for command in commands:
            record = self.records[command.record]
            match command:
                case e.Watch():
                    record.watched = True
                    if record.open:
                        self._watch(record, clock_s, cause=cause)
                    continue
                case e.Write() | e.Release() | e.Discard() if not record.open:
                    self._carry_out(self.state.tell(e.Held(record.storage)), clock_s, cause=cause)
                case e.Write():
                    self.traffic.ask_write(record, clock_s, cause=cause)
                case e.Release():
                    self.state.tell(e.Released(record.storage))
                    record.landed_s = clock_s
                    self.state.gone(record, clock_s)
                case e.Discard():
                    self.state.gone(record, clock_s, discarded=True)
            changed = True
        return changed

    def _watch(self, record: Record, clock_s: float, *, cause: str) -> None:
        record.watched = False
        self._carry_out(self.state.tell(e.Sole(record.storage)), clock_s, cause=cause)

    # ---- making again ----

    def _recipe(self, index: int, remade: Sequence[Record]) -> Recipe | None:
        if not remade or self.remaker is None:
            return None
        storages = {record.storage for record in remade}
        due = self.agenda.moments[index].due
        planned = {op for trip in due if trip.record.storage in storages for op in trip.ops or ()}
        ended = [trip.record.storage for trip in due if trip.ops is not None and not trip.returns]
        recipe = self.remaker.recipe(storages, index, planned=planned, ended=ended)
        op = self.state.op
        self.state.peak_bytes[op] = max(self.state.peak_bytes[op], recipe.peak_bytes)
        for storage in recipe.fetched:
            self.state.tell(e.Due((storage,)))
        return recipe

    def _operands(self, recipe: Recipe | None) -> set[int]:
        return {operand for op in recipe.ops for operand in self.ops[op].reads} if recipe is not None else set()

    def _remake(self, recipe: Recipe, remade: Sequence[Record], clock_s: float) -> float:
        """Run operators again before the one that waits; return when they have ended."""
        self.state.waiting = False
        self.state.note(clock_s)
        self.state.waiting = True
        for record in remade:
            self.recording.absent(clock_s, record.storage, gone=False)
        self.recording.scratch += self.remaker.transients(recipe, clock_s) if self.remaker is not None else []
        if self.state.equations is not None:
            self.state.equations.run_again(recipe.ops)
        for op in recipe.ops:
            end_s = clock_s + self.ops[op].duration_s
            self.recording.span(Lane.RECOMPUTE, clock_s, end_s, op)
            self._touch(self.ops[op].reads, end_s)
            clock_s = end_s
        self.recording.recompute_s += sum(self.ops[op].duration_s for op in recipe.ops)
        for record in remade:
            self.state.arrived(record)
            self.state.tell(e.Remade(record.storage))
        return clock_s

    def _touch(self, storages: Iterable[int], at_s: float) -> None:
        for storage in storages:
            record = self.records.get(storage)
            if record is not None:
                record.touched_s = at_s

    # ---- the end of an operator ----

    def _release(self, storages: Iterable[int]) -> None:
        for storage in storages:
            record = self.records[storage]
            self.traffic.forget(record)
            record.gone = True
            self.state.released(record)
            self.state.tell(e.Gone(storage))

    def _stall(self, op: int, start_s: float, end_s: float, *, cause: str, storage: int | None = None) -> None:
        if end_s > start_s:
            self.recording.span(Lane.STALL, start_s, end_s, op, cause=cause, storage=storage)
            if self.waited_link is not None:
                lasts_s = self.waited_link.wait_s(end_s - start_s)
                begun_s = self.begun_s
                self.waits.append(Wait(start_s=start_s - begun_s, end_s=end_s - begun_s, lasts_s=lasts_s))
