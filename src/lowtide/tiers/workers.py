"""A few threads and two lanes of tasks: reads, then writes."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol


class Lane(IntEnum):
    """A queue of tasks; a thread looks into the lanes in this order.

    READ: an operator waits for the bytes, now or soon.
    WRITE: memory waits to be freed; no operator computes with it.
    """

    READ = 0
    WRITE = 1


class Task(Protocol):
    """What a worker runs."""

    def run(self) -> None:
        """Do the work; errors are kept by the task, never raised."""


class Workers:
    """Threads that run tasks first in, first out in each lane. `submit` never waits for a task.

    The threads are daemons: a store that was never closed does not keep the interpreter from ending.
    """

    def __init__(self, threads: int) -> None:
        self._lanes: tuple[deque[Task], ...] = tuple(deque() for _ in Lane)
        self._wake = threading.Condition(threading.Lock())
        self._stopped = False
        self._owner_pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._loop, name=f"lowtide-spill-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: Lane, tasks: Iterable[Task]) -> bool:
        """Queue `tasks`; return False, with nothing queued, once the workers were stopped."""
        tasks = tuple(tasks)
        with self._wake:
            if self._stopped:
                return False
            self._lanes[lane].extend(tasks)
            self._wake.notify(len(tasks))
        return True

    def stop(self) -> list[Task]:
        """Let the threads end after the task each is running; return the tasks that will never run."""
        if os.getpid() != self._owner_pid:
            # A forked child has neither the threads nor a say over the lock, which one of them may hold.
            return []
        with self._wake:
            self._stopped = True
            waiting = [task for lane in self._lanes for task in lane]
            for lane in self._lanes:
                lane.clear()
            self._wake.notify_all()
        return waiting

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        while (task := self._next()) is not None:
            task.run()
            # A task reaches the memory it moved: an idle thread must not keep it alive.
            del task

    def _next(self) -> Task | None:
        with self._wake:
            while True:
                for lane in self._lanes:
                    if lane:
                        return lane.popleft()
                if self._stopped:
                    return None
                self._wake.wait()
