"""What if, on the graph of a step's tasks: operators and transfers with what each waits for (Daydream, ATC 2020).

Zhu et al. turn a profile into a graph: a task belongs to a thread of execution, and begins when the one before it on
that thread and all it depends on have ended. The primitives select, scale, insert and remove tasks; `makespan` plays
the result: a frontier of tasks that could begin, a clock for each thread.

    graph = of_timeline(timeline)
    copies = graph.select(lambda task: task.thread == Lane.OUT)
    faster = graph.scale(copies, factor=0.5).makespan_s()

`whatif.py` has the same primitives on traces, for what is planned again. Here the schedule stays as it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from lowtide.core.timeline import Lane, Span, Timeline
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something that takes a thread's time. `after`: the tasks, by position, that have to end before it begins."""

    name: str
    thread: str
    duration_s: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks in an order in which each comes after all that it waits for; those of a thread run in this order."""

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        for place, task in enumerate(self.tasks):
            if any(not 0 <= one < place for one in task.after):
                raise BadArgument(f"task {place}, {task.name!r}, waits for {task.after}: only for tasks before it")

    def select(self, where: Callable[[Task], bool]) -> tuple[int, ...]:
        """Return the positions of the tasks for which `where` holds."""
        return tuple(place for place, task in enumerate(self.tasks) if where(task))

    def scale(self, chosen: Collection[int], *, factor: float) -> TaskGraph:
        """Return the graph with these tasks taking `factor` times as long."""
        if not 0 <= factor < float("inf"):
            raise BadArgument(f"factor {factor} is negative: give 0 or more")
        return TaskGraph(
            tuple(
                replace(task, duration_s=task.duration_s * factor) if place in chosen else task
                for place, task in enumerate(self.tasks)
            )
        )

    def insert(self, task: Task, *, at: int, before: Collection[int] = ()) -> TaskGraph:
        """Return the graph with a task at a position; the tasks `before`, by their positions now, wait for it too."""
        if not 0 <= at <= len(self.tasks):
            raise BadArgument(f"there is no position {at}: the graph has {len(self.tasks)} tasks")
        moved = [
            replace(
                one,
                after=tuple(
                    sorted({k + (k >= at) for k in one.after} | ({at} if place in before else set())),
                ),
            )
            for place, one in enumerate(self.tasks)
        ]
        return TaskGraph((*moved[:at], task, *moved[at:]))

    def remove(self, chosen: Collection[int]) -> TaskGraph:
        """Return the graph without these tasks; their dependants wait for their dependencies instead."""
        gone = set(chosen)
        stands_for: list[frozenset[int]] = []
        left: list[Task] = []
        for place, task in enumerate(self.tasks):
            after = frozenset[int]().union(*(stands_for[k] for k in task.after))
            if place in gone:
                stands_for.append(after)
            else:
                stands_for.append(frozenset({len(left)}))
                left.append(replace(task, after=tuple(sorted(after))))
        return TaskGraph(tuple(left))

    def ends_s(self) -> tuple[float, ...]:
        """Return when each task ends: it begins when its thread is free and all it waits for is over."""
        clock: dict[str, float] = {}
        ends: list[float] = []
        for task in self.tasks:
            begin_s = max((clock.get(task.thread, 0.0), *(ends[k] for k in task.after)))
            clock[task.thread] = begin_s + task.duration_s
            ends.append(clock[task.thread])
        return tuple(ends)

    def makespan_s(self) -> float:
        """Return when the last task ends."""
        return max(self.ends_s(), default=0.0)


def of_trace(trace: Trace) -> TaskGraph:
    """Return the graph of an unmanaged step: its operators, on one thread."""
    return TaskGraph(tuple(Task(name=op.name, thread=Lane.COMPUTE, duration_s=op.duration_s) for op in trace.ops))


def of_timeline(timeline: Timeline) -> TaskGraph:
    """Return the graph of a step that was simulated or executed: operators and transfers, each on its lane.

    A transfer waits for the operators before the one at whose start it was asked for. An operator that waited for a
    storage waits for the transfer that brought it; one that waited for room or a landing, for the write that ended its
    wait. A transfer that began just when something ended waits for that, too: it had no room before.
    """
    waits: dict[int, list[Span]] = {}
    for span in timeline.spans:
        if span.lane is Lane.STALL:
            waits.setdefault(span.op, []).append(span)
    order = {Lane.OUT: 0, Lane.IN: 1, Lane.RECOMPUTE: 2, Lane.COMPUTE: 3}
    spans = sorted((one for one in timeline.spans if one.lane in order), key=lambda one: (one.start_s, order[one.lane]))
    tasks: list[Task] = []
    computed: dict[int, int] = {}
    moves: list[tuple[Span, int]] = []
    ended_at: dict[float, list[int]] = {}
    for span in spans:
        after = set[int]()
        if span.lane in (Lane.OUT, Lane.IN):
            asked = [place for op, place in computed.items() if op < span.op]
            after.update(asked[-1:])
            after.update(ended_at.get(round(span.start_s, 12), ()))
        else:
            for wait in waits.get(span.op, ()):
                ended = [(move, place) for move, place in moves if move.end_s <= wait.end_s * (1 + 1e-9) + 1e-12]
                if wait.cause == "arrival":
                    came = [place for move, place in ended if move.lane is Lane.IN and move.storage == wait.storage]
                    after.update(came)
                else:
                    writes = [(move.end_s, place) for move, place in ended if move.lane is Lane.OUT]
                    after.update(place for _, place in sorted(writes)[-1:])
            computed[span.op] = len(tasks)
        if span.lane in (Lane.OUT, Lane.IN):
            moves.append((span, len(tasks)))
        thread = Lane.COMPUTE if span.lane is Lane.RECOMPUTE else span.lane
        duration_s = span.end_s - span.start_s
        ended_at.setdefault(round(span.end_s, 12), []).append(len(tasks))
        tasks.append(Task(name=_name(span), thread=thread, duration_s=duration_s, after=tuple(sorted(after))))
    return TaskGraph(tuple(tasks))


def _name(span: Span) -> str:
    what = span.storage if span.lane in (Lane.OUT, Lane.IN) else span.op
    return f"{span.lane} {what}"
