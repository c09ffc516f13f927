"""A simulated accelerator: the PyTorch device `sim`, with memory, streams and copy engines of its own, on the CPU.

import lowtide.emulator
emulator = lowtide.emulator.enable(capacity="2GiB", preset="v100")
model.to("sim")            # torch.accelerator, streams, events, pinned memory, autocast: as with a real one
print(emulator.stats())

It computes with the CPU's kernels, bit for bit, and is asynchronous: launches return at once, copies take their time,
and a missing synchronisation gives wrong data. With `races=True` it is reported, every time. See docs/emulator.md.
"""

from __future__ import annotations

from lowtide.emulator.device import Emulator, Settings, check, current, enable
from lowtide.emulator.presets import PRESETS, Preset, preset
from lowtide.emulator.records import EngineStats, Stats, TraceRecord

__all__ = [
    "PRESETS",
    "Emulator",
    "EngineStats",
    "Preset",
    "Settings",
    "Stats",
    "TraceRecord",
    "check",
    "current",
    "enable",
    "preset",
]
