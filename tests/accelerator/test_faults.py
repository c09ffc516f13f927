"""What happens when a tier fails, a step raises or a tide ends: nothing is lost silently, nothing is left behind."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.errors import BadArgument, BudgetTooSmall, SpillCorrupted, SpillError
from lowtide.tiers.file import FileMedium
from lowtide.tiers.wrappers import Direction, Fault, FaultKind, Faulty
from tests.accelerator.devices import NAME
from tests.accelerator.training import MIB, chain, gradient, start, tight_bytes

SMALL_HOST = 3 * MIB


def budget(device: torch.device, *, host_bytes: int = SMALL_HOST, activations: int = 5) -> dict[str, int | str]:
    return {"device": tight_bytes(device, activations=activations), "cpu": host_bytes}


def test_what_does_not_fit_into_host_memory_goes_on_to_the_disk(device: torch.device, tmp_path: Path) -> None:
    x, expected = start(device)
    with lowtide.fit(budget=budget(device), spill=tmp_path) as tide:
        for _ in range(4):
            assert torch.equal(gradient(tide, x), expected)
        stats = tide.stats()
    assert int(str(stats["disk_written_bytes"])) > 0
    assert int(str(stats["disk_read_bytes"])) > 0
    assert int(str(stats["host_peak_bytes"])) <= SMALL_HOST
    assert int(str(stats["peak_bytes"])) <= int(str(stats["budget_bytes"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [FaultKind.ENOSPC, FaultKind.EIO])
def test_a_failed_write_keeps_the_data_in_host_memory_and_says_so(
    kind: FaultKind, device: torch.device, tmp_path: Path
) -> None:
    x, expected = start(device)
    # Half of the host's memory holds all that leaves, so the training goes on without the disk; beyond that half it is
    # asked ahead of need.
    faults = [Fault(direction=Direction.WRITE, nth=1, kind=kind, lasting=True)]
    medium = Faulty(FileMedium([tmp_path]), script=faults)
    with lowtide.fit(budget=budget(device, host_bytes=6 * MIB), spill=medium) as tide:
        with pytest.warns(RuntimeWarning, match="keeping the data in memory"):
            for _ in range(4):
                assert torch.equal(gradient(tide, x), expected)
        assert int(str(tide.stats()["disk_written_bytes"])) == 0


def test_where_neither_host_memory_nor_disk_has_room_the_budget_is_too_small(
    device: torch.device, tmp_path: Path
) -> None:
    x, expected = start(device)
    full = {**budget(device, host_bytes=MIB, activations=3), "disk": 4096}
    with lowtide.fit(budget=full, spill=tmp_path) as tide:
        with pytest.raises(BudgetTooSmall, match="no room") as caught:
            gradient(tide, x)
        assert caught.value.needed_bytes > caught.value.budget_bytes
        caught.value.__traceback__ = None
        del caught
    x.grad = None
    gc.collect()
    chain(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), expected), "the tensors are usable after the refusal"


@pytest.mark.parametrize(
    ("kind", "error"),
    [(FaultKind.EIO, SpillError), (FaultKind.SHORT_READ, SpillError), (FaultKind.FLIP, SpillCorrupted)],
)
def test_a_failed_read_is_an_error_and_the_next_step_is_exact(
    kind: FaultKind, error: type[SpillError], device: torch.device, tmp_path: Path
) -> None:
    x, expected = start(device)
    medium = Faulty(FileMedium([tmp_path]), script=[Fault(direction=Direction.READ, nth=2, kind=kind)])
    with lowtide.fit(budget=budget(device), spill=medium, verify=True) as tide:
        with pytest.raises(error, match="saved for backward") as caught:
            for _ in range(4):
                gradient(tide, x)
        assert caught.type is error
        caught.value.__traceback__ = None
        del caught
        gc.collect()
        x.grad = None
        assert torch.equal(gradient(tide, x), expected)


@pytest.mark.parametrize("host_bytes", [SMALL_HOST, 64 * MIB])
def test_a_graph_outlives_its_tide(host_bytes: int, device: torch.device, tmp_path: Path) -> None:
    x, expected = start(device)
    with lowtide.fit(budget=budget(device, host_bytes=host_bytes), spill=tmp_path) as tide:
        with tide.step():
            out = chain(x).sum()
        assert int(str(tide.stats()["swapped_out_bytes"])) > 0
    out.backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), expected)


def test_after_an_exception_nothing_is_brought_back(device: torch.device, tmp_path: Path) -> None:
    x, _ = start(device)
    out: list[Tensor] = []
    tide = lowtide.fit(budget=budget(device), spill=tmp_path)

    def forward_only() -> None:
        with tide, tide.step():
            out.append(chain(x).sum())
            raise KeyError("the user's own")

    with pytest.raises(KeyError):
        forward_only()
    assert int(str(tide.stats()["swapped_in_bytes"])) == 0
    with pytest.raises(SpillError, match="closed before backward"):
        out[0].backward()
    out.clear()
    assert list(tmp_path.iterdir()) == []
    plain = chain(x).sum()
    plain.backward()  # the limit is lifted and the guard is gone


def test_a_step_that_raises_leaves_no_mode_behind(device: torch.device, tmp_path: Path) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    x, expected = start(device)
    with lowtide.fit(budget=budget(device), spill=tmp_path) as tide:
        with pytest.raises(KeyError):
            with tide.step():
                chain(x)
                raise KeyError("the user's own")
        assert torch.equal(gradient(tide, x), expected)
    assert _get_current_dispatch_mode() is None


def test_a_saved_tensor_that_is_changed_in_place_raises_as_in_stock(device: torch.device, tmp_path: Path) -> None:
    def run() -> str:
        x = torch.ones(MIB // 4, device=device, requires_grad=True)
        y = x * 2
        out = y.square().sum()
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            out.backward()
        return str(caught.value)[str(caught.value).index("is at version") :].split(" Hint")[0]

    stock = run()
    with lowtide.fit(budget={"device": 256 * MIB}, spill=tmp_path) as tide, tide.step():
        managed = run()
    assert managed == stock


def test_a_pack_is_closed_without_waiting_for_the_lock(device: torch.device, tmp_path: Path) -> None:
    from lowtide.execute.backends.accelerator.backend import AcceleratorBackend
    from lowtide.residency.events import Gone

    backend = AcceleratorBackend(FileMedium([tmp_path]), device=device, host_bytes=4 * MIB)
    packed = backend.pack(torch.ones(1000, device=device))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with backend._lock:
            held.set()
            done.wait(20)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(20)
    try:
        backend.close_pack(packed.pack)
        backend.close_pack(packed.pack)
        assert backend._records.get(packed.record) is None, "its memory goes at once"
    finally:
        done.set()
        other.join()
    assert Gone(packed.record) in backend.events()
    backend.close()


def test_a_second_tide_on_the_same_device_waits_for_the_first_to_be_closed(
    device: torch.device, tmp_path: Path
) -> None:
    with lowtide.fit(budget={"device": "64MiB"}, spill=tmp_path):
        with pytest.raises(BadArgument, match=f"another tide is open on {NAME}:0"):
            lowtide.fit(budget={"device": "64MiB"}, spill=tmp_path)
    lowtide.fit(budget={"device": "64MiB"}, spill=tmp_path).close()
