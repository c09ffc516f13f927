"""What an allocator says when it refuses: how much was asked for, and on which device.

Where a training is on several devices, an operator that copies from one to another may find no room on either. Every
device's allocator names itself: CUDA's and XPU's as "GPU 1 has a total capacity of", the emulator's as "sim:1 has a
total capacity of"; our own refusal says that so much is "in use on sim:1".
"""

from __future__ import annotations

import re

import torch

from lowtide.core.units import parse_bytes

_ASKED = re.compile(r"Tried to allocate ([\d.]+ ?\w+)")
_DEVICE = re.compile(r"(?:\b(?:GPU |[a-z]+:)(\d+) has a total capacity of|\bin use on [a-z]+:(\d+))")


def asked_bytes(error: torch.OutOfMemoryError) -> int:
    """Return how much was asked for (0: it does not say)."""
    found = _ASKED.search(str(error))
    if found is None:
        return 0
    try:
        return parse_bytes(found[1])
    except ValueError:
        return 0


def concerns(error: torch.OutOfMemoryError, device: torch.device) -> bool:
    """Tell whether memory ran out on this device; an error that names no device may concern any."""
    found = _DEVICE.search(str(error))
    return found is None or device.type == "cpu" or int(found[1] or found[2]) == device.index
