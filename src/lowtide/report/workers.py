"""Runs a function over many items in processes: results in order, a process that dies is named, Ctrl-C ends all.

The processes are fresh interpreters, not forks (the caller may have threads, torch's among them, and a fork of those
can deadlock) and not multiprocessing's spawn (which runs the caller's script once more).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, TypeVar

from lowtide.errors import LowtideError

Item = TypeVar("Item")
Result = TypeVar("Result")

_PROGRAM = "import sys; from lowtide.report.workers import serve; serve(int(sys.argv[1]))"


class WorkerDied(LowtideError, RuntimeError):
    """A process ended before its item was done."""


def run_all(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    jobs: int,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Return `function(item)` for every item, in their order, computed in `jobs` processes (1: in this one).

    `on_done(done, total)` is called here after each item. What the function raises is raised here. With processes, the
    function, the items and the results are pickled.
    """
    results: dict[int, Result] = {}

    def take(index: int, result: Result) -> None:
        results[index] = result
        if on_done is not None:
            on_done(len(results), len(items))

    if jobs == 1:
        for index, item in enumerate(items):
            take(index, function(item))
    else:
        _run_in_processes(function, items, jobs=jobs, take=take)
    return [results[index] for index in range(len(items))]


def _run_in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], *, jobs: int, take: Callable[[int, Result], None]
) -> None:
    waiting = list(range(len(items)))[::-1]
    workers: dict[Connection, subprocess.Popen[bytes]] = {}
    busy: dict[Connection, int] = {}

    def hand_out(link: Connection) -> None:
        if waiting:
            busy[link] = waiting.pop()
            # If the worker is gone, reading from it says so, and how it ended.
            with suppress(OSError):
                link.send(items[busy[link]])

    try:
        for _ in range(jobs):
            # A process that was started is known, or Ctrl-C could not end it.
            with _interrupts_later():
                link, worker = _start()
                workers[link] = worker
            with suppress(OSError):
                link.send(function)
        for link in workers:
            hand_out(link)
        while busy:
            ready = wait(list(busy))
            for link in [each for each in busy if each in ready]:
                index = busy.pop(link)
                take(index, _answer(link, workers[link], items[index]))
                hand_out(link)
    finally:
        with _interrupts_later():
            for link, worker in workers.items():
                link.close()
                worker.terminate()
            for worker in workers.values():
                worker.wait()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Put off Ctrl-C to the end of the block; only the main thread is ever interrupted by it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen and callable(before):
            before(*seen[0])


def _start() -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            # A group of its own: Ctrl-C reaches the first process alone, which ends the others.
            process_group=0,
        )
    return Connection(ours.detach()), worker


def _answer(link: Connection, worker: subprocess.Popen[bytes], item: object) -> Any:
    try:
        result, error = link.recv()
    except (EOFError, ConnectionError):
        raise WorkerDied(
            f"the process working on {item} ended with code {worker.wait()}: run with fewer jobs if memory ran out"
        ) from None
    if error is not None:
        raise error
    return result


def serve(descriptor: int) -> None:
    """Answer items with the function that comes first, until the other end closes; the processes' own side."""
    link = Connection(descriptor)
    # A policy's output must not mix with the caller's table.
    os.dup2(2, 1)
    with suppress(EOFError, ConnectionError):
        function = link.recv()
        while True:
            item = link.recv()
            try:
                answer: tuple[Any, BaseException | None] = (function(item), None)
            except Exception as error:  # noqa: BLE001 - raised again where the result is awaited
                answer = (None, error)
            link.send(answer)
