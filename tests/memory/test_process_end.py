"""However a process ends while bytes are on their way: it does end, and leaves nothing behind (R7)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.memory.engine import (
    MIB,
    PATIENCE_S,
    Engine,
    HeldMedium,
    files,
    filled,
    in_fresh_process,
    pattern,
    peek,
)

Opened = Callable[..., Engine]


def end_while_moving(directory: Path, medium: str, way: str) -> str:
    """End the process with transfers under way."""
    held = HeldMedium()
    engine = Engine(held if medium == "python" else files(directory), budget=512 * MIB)
    kept = [filled(16 * MIB, seed) for seed in range(4)]
    if medium == "python":
        held.may_write.clear()
    for each in kept:
        engine.start_leaving(each)
    if medium == "python":
        assert held.writing.acquire(timeout=PATIENCE_S)
    if way == "a thread waits":
        threading.Thread(target=peek, args=(kept[0],), daemon=True).start()
        threading.Thread(target=kept[1].sum, daemon=True).start()
    if way == "_exit":
        os._exit(0)
    if way == "exit":
        sys.exit(0)
    globals()["kept_until_the_end"] = kept
    return "ends"


@pytest.mark.parametrize("medium", ["file", "python"])
@pytest.mark.parametrize("way", ["return", "exit", "_exit", "a thread waits"])
def test_a_process_ends_with_transfers_under_way(tmp_path: Path, medium: str, way: str) -> None:
    outcome = in_fresh_process(end_while_moving, tmp_path, medium, way)
    assert outcome.exit_code == 0, outcome.stderr
    assert not list(tmp_path.iterdir())


def be_killed(directory: Path) -> None:
    """Die with everything away."""
    engine = Engine(files(directory))
    kept = [filled(4 * MIB, seed) for seed in range(4)]
    engine.send_away(*kept)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_no_files(tmp_path: Path) -> None:
    assert in_fresh_process(be_killed, tmp_path).exit_code == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def be_interrupted() -> str:
    """Get Ctrl-C while an allocation waits for room."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    medium = HeldMedium()
    engine = Engine(medium, budget=4 * MIB)
    x = filled(3 * MIB)
    medium.may_write.clear()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        assert medium.writing.acquire(timeout=PATIENCE_S)  # the allocation waits for this write
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        torch.empty(3 * MIB, dtype=torch.uint8)
        raise AssertionError("there was room")
    except torch.OutOfMemoryError:
        found = engine.memory.interruption()
    thread.join(PATIENCE_S)
    medium.may_write.set()
    engine.native.settle()
    assert torch.equal(x, pattern(3 * MIB))
    del x
    engine.close()
    return type(found).__name__


def test_ctrl_c_ends_a_wait_for_room() -> None:
    outcome = in_fresh_process(be_interrupted)
    assert outcome.value == "KeyboardInterrupt", outcome.stderr


def fork_and_exec(directory: Path) -> int:
    """Become another program, in a child, while bytes are away and on their way."""
    engine = Engine(files(directory))
    kept = [filled(4 * MIB, seed) for seed in range(4)]
    engine.send_away(*kept[:2])
    engine.start_leaving(kept[2])
    pid = os.fork()
    if pid == 0:
        os.execv("/bin/sh", ["sh", "-c", "exit 7"])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert all(torch.equal(each, pattern(4 * MIB, seed)) for seed, each in enumerate(kept))
    return code


def test_exec_after_fork(tmp_path: Path) -> None:
    assert in_fresh_process(fork_and_exec, tmp_path).value == 7
