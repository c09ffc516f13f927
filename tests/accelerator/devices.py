"""The device under test: the emulator's, or the one that $LOWTIDE_TEST_DEVICE names (`make test-cuda`)."""

from __future__ import annotations

import os

import torch

NAME = os.environ.get("LOWTIDE_TEST_DEVICE", "sim")
IS_EMULATED = NAME == "sim"
CAPACITY_BYTES = 1 << 30
JITTER_S = 2e-4


def device() -> torch.device:
    """Return the device, which exists from now on."""
    if IS_EMULATED:
        from tests.emulator.devices import fresh

        fresh(capacity=CAPACITY_BYTES)
    return torch.device(NAME, 0)


def shake(seed: int | None, **knobs: object) -> None:
    """Let every job of the emulated device come late by a random time, and fill new memory with NaN (None: neither)."""
    if not IS_EMULATED:
        return
    from tests.emulator.devices import fresh

    if seed is None:
        fresh(capacity=CAPACITY_BYTES, **knobs)
    else:
        fresh(capacity=CAPACITY_BYTES, jitter_s=JITTER_S, seed=seed, poison=True, **knobs)


def races() -> tuple[str, ...]:
    """Return what the emulator's race detector found since it was asked last."""
    if not IS_EMULATED:
        return ()
    import lowtide.emulator

    emulator = lowtide.emulator.current()
    assert emulator is not None
    return emulator.races()
