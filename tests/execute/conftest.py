"""Settings of the runtime's tests."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
import torch

HANG_S = 100


@pytest.fixture(autouse=True, scope="package")
def one_compute_thread() -> Iterator[None]:
    """Compute with one thread: at these sizes a second one only waits, and sums come out otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """End the process with every thread's stack if a test hangs: a deadlock must not look like a slow machine."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
