"""Settings of the exactness suite."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch


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


@pytest.fixture(autouse=True, scope="package")
def unfreeze_afterwards() -> Iterator[None]:
    """Undo what `workload.build` freezes."""
    yield
    gc.unfreeze()
