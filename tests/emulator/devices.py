"""The process's emulator, and scripts that need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import asdict
from typing import Any

from lowtide.emulator import Emulator, Settings, current, enable

CAPACITY = 256 * 2**20
DEVICES = 2  # most tests use the first


def fresh(*, capacity: int | str = CAPACITY, **knobs: Any) -> Emulator:
    """Return the emulator with these knobs and all others at their defaults, its counters and findings empty."""
    emulator = current() or enable(capacity, devices=DEVICES)
    defaults = asdict(Settings(capacity_bytes=CAPACITY, devices=emulator.settings.devices))
    defaults.pop("capacity_bytes")
    emulator.configure(capacity=capacity, **(defaults | knobs))
    emulator.set_pressure_callback(None)
    emulator.reset_stats()
    emulator.races()
    return emulator


def run_alone(code: str, *, timeout_s: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
