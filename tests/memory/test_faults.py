"""Whatever nobody announced faults and is served: any thread, with or without the GIL; the rest goes where it went."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.memory.engine import (
    MIB,
    PATIENCE_S,
    Engine,
    HeldMedium,
    Outcome,
    address_of,
    files,
    filled,
    in_fresh_process,
    pattern,
    peek,
    poke,
    raw_array,
)

Opened = Callable[..., Engine]


def test_reads_and_writes_of_bare_memory(opened: Opened) -> None:
    engine = opened()
    x, want = filled(MIB), pattern(MIB).numpy()
    engine.send_away(x)
    assert np.array_equal(raw_array(x), want)
    engine.send_away(x)
    raw_array(x)[100:200] = 5
    want[100:200] = 5
    engine.send_away(x)
    assert ctypes.string_at(address_of(x), MIB) == want.tobytes()
    engine.send_away(x)
    ctypes.memset(address_of(x) + 777, 9, 50)
    want[777:827] = 9
    engine.send_away(x)
    assert torch.equal(x, torch.from_numpy(want))
    assert engine.counted.faults == 4


def test_threads_fault_on_one_range_and_on_others(opened: Opened) -> None:
    engine = opened()
    xs = [filled(MIB, seed) for seed in range(6)]
    for _ in range(5):
        engine.send_away(*xs)
        start = threading.Barrier(12)
        wrong: list[int] = []

        def read(number: int, start: threading.Barrier = start, wrong: list[int] = wrong) -> None:
            start.wait(PATIENCE_S)
            right = [np.array_equal(raw_array(xs[which]), pattern(MIB, which).numpy()) for which in (0, number % 6)]
            wrong.extend(number for each in right if not each)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not wrong


def test_workers_of_a_kernel_fault(opened: Opened) -> None:
    engine = opened(announcing=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        x = torch.arange(MIB, dtype=torch.float32)
        for _ in range(5):
            engine.send_away(x)
            assert float((x * 2).sum(dtype=torch.float64)) == MIB * (MIB - 1)
    finally:
        torch.set_num_threads(before)
    assert engine.counted.faults > 0


def test_a_fault_with_the_gil_lets_a_medium_in_python_work(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium, budget=6 * MIB)
    xs = [filled(MIB, seed) for seed in range(12)]  # reading one back makes others leave: writes need the GIL as well
    for seed, x in enumerate(xs):
        assert np.array_equal(raw_array(x), pattern(MIB, seed).numpy())
    assert engine.counted.faults > 0


def test_a_fault_waits_while_others_run(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    x = filled(MIB)
    engine.send_away(x)
    medium.may_read.clear()
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(peek(x)))
    thread.start()
    assert medium.reading.acquire(timeout=PATIENCE_S)
    y = filled(MIB, 5)  # allocating, operators and faults of this thread go on
    assert torch.equal(y, pattern(MIB, 5))
    assert not got
    medium.may_read.set()
    thread.join(PATIENCE_S)
    assert got == [int(pattern(MIB)[0])]


def test_a_free_wakes_whoever_waits_for_room(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium, budget=7 * MIB // 2)
    x, y = filled(MIB, 1), filled(2 * MIB, 2)
    engine.send_away(x)
    assert medium.writing.acquire(timeout=PATIENCE_S)
    z = filled(MIB, 3)
    medium.may_write.clear()
    thread = threading.Thread(target=peek, args=(x,))  # finds no room: something has to leave
    thread.start()
    assert medium.writing.acquire(timeout=PATIENCE_S)
    leaving = [each for each in (y, z) if int(engine.place(each) or 0) == 1]
    assert len(leaving) == 1
    del y, z, leaving
    medium.may_write.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert torch.equal(x, pattern(MIB, 1))


# ---- what is not ours ----


def segfault_with_faulthandler(directory: Path, when: str) -> None:
    """Fault where nothing is mapped, with faulthandler there before or after the engine."""
    if when == "before":
        faulthandler.enable()
    engine = Engine(files(directory))
    if when != "before":
        faulthandler.enable()
    if when == "after, in a step":
        engine.native.step_begin(-1)
        x = filled(MIB)
        engine.send_away(x)
        assert peek(x) == int(pattern(MIB)[0])  # ours is served, whoever came after us
    ctypes.string_at(64)


@pytest.mark.parametrize("when", ["before", "after", "after, in a step"])
def test_faulthandler_still_speaks(tmp_path: Path, when: str) -> None:
    outcome = in_fresh_process(segfault_with_faulthandler, tmp_path, when)
    assert outcome.exit_code == -signal.SIGSEGV
    assert outcome.stderr.count("Fatal Python error: Segmentation fault") == 1
    assert "segfault_with_faulthandler" in outcome.stderr


def send_sigsegv(directory: Path, handler: str) -> str:
    """Get SIGSEGV from kill(2)."""
    got: list[int] = []
    if handler == "ignored":
        signal.signal(signal.SIGSEGV, signal.SIG_IGN)
    elif handler == "python":
        signal.signal(signal.SIGSEGV, lambda number, _: got.append(number))
    engine = Engine(files(directory))
    os.kill(os.getpid(), signal.SIGSEGV)
    if handler == "default":
        return "survives"
    x = filled(MIB)
    engine.send_away(x)
    assert peek(x) == int(pattern(MIB)[0])
    return f"goes on {got}"


def test_a_signal_that_somebody_sent(tmp_path: Path) -> None:
    ended = in_fresh_process(send_sigsegv, tmp_path, "default")
    assert (ended.value, ended.exit_code) == (None, -signal.SIGSEGV)
    assert in_fresh_process(send_sigsegv, tmp_path, "ignored").value == "goes on []"
    assert in_fresh_process(send_sigsegv, tmp_path, "python").value == "goes on [11]"


HANDLER = """
#include <setjmp.h>
#include <signal.h>
#include <string.h>
static sigjmp_buf back;
static struct sigaction before;
static void jump(int signal, siginfo_t *info, void *context) { siglongjmp(back, 1); }
void install(void) {
  struct sigaction ours;
  memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = jump;
  ours.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &ours, &before);
}
/* 1: the address cannot be read */
int probe(volatile char *address) {
  if (sigsetjmp(back, 1)) return 1;
  (void)*address;
  return 0;
}
"""


def probe_addresses(directory: Path, library: str) -> list[int]:
    """Ask a library that jumps out of its fault handler."""
    probing = ctypes.CDLL(library)
    probing.probe.argtypes = [ctypes.c_void_p]
    probing.install()
    engine = Engine(files(directory))
    x = filled(MIB)
    engine.send_away(x)
    found = [probing.probe(64), probing.probe(address_of(x)), probing.probe(128), probing.probe(64)]
    engine.send_away(x)
    return [*found, probing.probe(address_of(x))]


def test_a_handler_of_a_library_gets_what_is_not_ours(tmp_path: Path) -> None:
    source, library = tmp_path / "probe.c", tmp_path / "probe.so"
    source.write_text(HANDLER)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    outcome: Outcome = in_fresh_process(probe_addresses, tmp_path, str(library))
    assert outcome.value == [1, 0, 1, 1, 0], outcome.stderr


def use_after_free(directory: Path) -> None:
    """Read a tensor's memory after it was freed while away."""
    engine = Engine(files(directory))
    x = filled(3 * MIB)
    engine.send_away(x)
    address = address_of(x)
    del x
    engine.native.trim()
    ctypes.string_at(address, 8)


def test_memory_that_was_freed_is_not_served(tmp_path: Path) -> None:
    assert in_fresh_process(use_after_free, tmp_path).exit_code == -signal.SIGSEGV


def test_a_stray_write_next_to_a_range_is_the_programs_error(tmp_path: Path) -> None:
    script = """
        import sys, ctypes
        from pathlib import Path
        from tests.memory.engine import *
        engine = Engine(files(Path(sys.argv[1])))
        x = filled(MIB)
        engine.send_away(x)
        poke(x, 1, MIB - 1)
        for offset in range(MIB, 1 << 40, MIB):
            poke(x, 1, offset)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=False)
    assert run.returncode == -signal.SIGSEGV


def test_errno_survives_a_fault(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)
    libc = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(77)
    libc.memset(ctypes.c_void_p(address_of(x)), 3, 10)
    assert ctypes.get_errno() == 77
    assert poke(x, 3) is None
