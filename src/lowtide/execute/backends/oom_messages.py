"""What an allocator says when it refuses, and on which device.

Where a training is on several devices, an operator that copies from one to another may find no room on either. Every
device's allocator names itself: CUDA's and XPU's as "GPU 1 has a total capacity of", the emulator's as "sim:1 has a
total capacity of".
"""

from __future__ import annotations

import re

import torch

_DEVICE = re.compile(r"\b(?:GPU |[a-z]+:)(\d+) has a total capacity of")
AWAY = "lowtide: this tensor is away from the device"
"""How the error begins that a touch of a tensor raises whose bytes were not brought back."""
_IN_TORCHSCRIPT = "failed in the TorchScript interpreter"


def may_be_refusal(error: RuntimeError) -> bool:
    """Tell whether an error may be a refusal for want of memory: an allocator's, or of a tensor that did not come back.

    TorchScript makes an error of its own of whatever it meets.
    """
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or _IN_TORCHSCRIPT in text or AWAY in text


def concerns(error: RuntimeError, device: torch.device) -> bool:
    """Tell whether memory ran out on this device; an error that names no device may concern any."""
    found = _DEVICE.search(str(error))
    return found is None or device.type == "cpu" or int(found[1]) == device.index
