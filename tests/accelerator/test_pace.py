"""The host's lead over the device is bounded, and waits are timed where they happen: on the device."""

from __future__ import annotations

import pytest
import torch

from lowtide.execute.backends.accelerator.order import on_stream
from lowtide.execute.backends.accelerator.pace import RunAhead, StreamTimes
from tests.accelerator.devices import IS_EMULATED, shake

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="only the emulator can be told to be slow")

MIB = 1 << 20


def test_the_host_is_never_further_ahead_than_the_bound(device: torch.device) -> None:
    host = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(MIB, dtype=torch.uint8, device=device)
    shake(None, h2d_bytes_per_s=100e6)  # ten milliseconds for each copy
    stream = torch.accelerator.current_stream(device)
    pace = RunAhead(most=4)
    reached: list[torch.Event] = []
    for _ in range(12):
        there.copy_(host, non_blocking=True)
        reached.append(stream.record_event())
        pace.step(stream)
        assert sum(not event.query() for event in reached) <= 4
    assert not reached[-1].query(), "the host did not wait for everything either"


def test_a_wait_is_timed_on_the_device_and_not_on_the_host(device: torch.device) -> None:
    host = torch.empty(4 * MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    shake(None, h2d_bytes_per_s=40 * MIB)
    copying, computing = torch.Stream(device=device), torch.accelerator.current_stream(device)
    with on_stream(copying):
        there.copy_(host, non_blocking=True)
        copied = copying.record_event()
    stalls = StreamTimes(device)
    stalls.around(computing, lambda: computing.wait_event(copied))
    assert stalls.total_s() == 0.0, "the device has not come that far"
    computing.synchronize()
    assert 0.05 < stalls.total_s() < 1.0
    assert stalls.total_s() == stalls.total_s()
