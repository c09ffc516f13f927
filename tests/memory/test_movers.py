"""The threads that move pages."""

from __future__ import annotations

from pathlib import Path

from tests.memory.engine import MIB, Engine, files, in_fresh_process

MOVERS = 10


def data_bytes() -> int:
    """Return what a limit on this process's data counts."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024


def grown_by_movers(directory: Path) -> int:
    """Return how much more data a process has with many movers than with one."""
    found = []
    for threads in (1, MOVERS):
        engine = Engine(files(directory), threads=threads)
        found.append(data_bytes())
        engine.close()
    return found[1] - found[0]


def test_a_limit_on_data_hardly_counts_movers(tmp_path: Path) -> None:
    outcome = in_fresh_process(grown_by_movers, tmp_path)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.value < MOVERS * MIB  # a thread's usual stack alone is 8 MiB
