"""What an allocator says when it refuses, and on which device.

Where a training is on several devices, an operator that copies from one to another may find no room on either. Every
device's allocator names itself: CUDA's and XPU's as "GPU 1 has a total capacity of", the emulator's as "sim:1 has a
total capacity of".
"""

from __future__ import annotations

import re

import torch

_DEVICE = re.compile(r"\b(?:GPU |[a-z]+:)(\d+) has a total capacity of")
_IN_TORCHSCRIPT = "failed in the TorchScript interpreter"


def may_be_refusal(error: RuntimeError) -> bool:
    """Tell whether an error may be an allocator's refusal: TorchScript makes one of its own of whatever it meets."""
    return isinstance(error, torch.OutOfMemoryError) or _IN_TORCHSCRIPT in str(error)


def concerns(error: RuntimeError, device: torch.device) -> bool:
    """Tell whether memory ran out on this device; an error that names no device may concern any."""
    found = _DEVICE.search(str(error))
    return found is None or device.type == "cpu" or int(found[1]) == device.index
