"""The state of the generators that a program draws from without naming one."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and PyTorch's generators, those of devices in use among them."""
    state = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    device = _device_in_use()
    if device is not None:
        module = torch.get_device_module(device)
        state["devices"] = {device.type: [module.get_rng_state(index) for index in range(module.device_count())]}
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Have the generators go on from `state`; those of devices that are not here are left out."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    device = _device_in_use()
    for kind, states in state.get("devices", {}).items():
        if device is None or device.type != kind:
            continue
        module = torch.get_device_module(device)
        for index, one in enumerate(states[: module.device_count()]):
            module.set_rng_state(one, index)


def _device_in_use() -> torch.device | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return None
    module = torch.get_device_module(device)
    # Starting a device to ask for its generator would take memory that the program does not use.
    return device if getattr(module, "is_initialized", lambda: True)() else None
