"""Settings of the accelerator's tests."""

from __future__ import annotations

import faulthandler
import gc
import sys
from collections.abc import Iterator

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

from lowtide.errors import BadArgument, NativeUnavailable
from tests.accelerator import devices

HANG_S = 240


@pytest.fixture(autouse=True, scope="session")
def a_device_exists() -> None:
    """Skip where neither the emulator can be built nor a device was named."""
    try:
        devices.device()
    except (NativeUnavailable, BadArgument) as error:
        pytest.skip(f"no device to test on: {error}")


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device, with the emulator's knobs at their defaults."""
    gc.collect()
    yield devices.device()
    torch.accelerator.synchronize()
    devices.shake(None)


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Compute with one thread: at these sizes a second one only waits, and much longer on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def forget_the_last_failure() -> None:
    """Free the traceback that the test runner keeps: its frames hold tensors, which would count in the next budget."""
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)


@pytest.fixture(autouse=True)
def no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process with every thread's stack if a test hangs: a deadlock must not look like a slow machine."""
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=request.config.stash[fault_handler_stderr_fd_key])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True, scope="package")
def unfreeze_afterwards() -> Iterator[None]:
    """Undo what `workload.build` freezes."""
    yield
    gc.unfreeze()
