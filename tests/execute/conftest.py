"""Settings of the runtime's tests."""

from __future__ import annotations

import faulthandler
import gc
from collections.abc import Iterator

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests.execute.training import Need, Training, need

HANG_S = 120
SLOW_HANG_S = 900


@pytest.fixture(scope="module")
def mlp_need(tmp_path_factory: pytest.TempPathFactory) -> Need:
    """Return what the small training takes."""
    return need(Training, tmp_path_factory.mktemp("need"))


@pytest.fixture(autouse=True, scope="package")
def one_compute_thread() -> Iterator[None]:
    """Compute with one thread: at these sizes a second one only waits, and sums come out otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="package")
def modules_out_of_the_collectors_sight() -> Iterator[None]:
    """Leave what is imported by now out of the collections, one of which every tide needs to open."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process with every thread's stack if a test hangs: a deadlock must not look like a slow machine."""
    # The terminal's own stderr: what the tests write to is captured, and would go with the process.
    stderr = request.config.stash[fault_handler_stderr_fd_key]
    limit_s = SLOW_HANG_S if request.node.get_closest_marker("slow") else HANG_S
    faulthandler.dump_traceback_later(limit_s, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
