"""One emulator for all tests of a process: a device cannot be removed again, so each test gets it with fresh knobs."""

from __future__ import annotations

import faulthandler
import gc
from collections.abc import Iterator

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

from lowtide.emulator import Emulator
from tests.emulator.devices import CAPACITY, fresh

HANG_S = 120


@pytest.fixture
def sim() -> Iterator[Emulator]:
    """The device with every knob at its default and nothing live."""
    gc.collect()
    emulator = fresh(capacity=CAPACITY)
    yield emulator
    torch.accelerator.synchronize()
    torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=0, device_type=20))
    fresh(capacity=CAPACITY)


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Compute with one thread: at these sizes a second one only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process with every thread's stack if a test hangs: a deadlock must not look like a slow machine."""
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=request.config.stash[fault_handler_stderr_fd_key])
    yield
    faulthandler.cancel_dump_traceback_later()
