"""A thousand random programs of allocations, copies, kernels, frees and events over several streams.

Each is synchronised as it should be, in one of several ways, and must give what the same program gives when every step
is done at once in host memory. Values are small integers, so that sums are exact in any order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from lowtide.emulator import Emulator
from tests.emulator.devices import fresh

PROGRAMS = 1000
BATCHES = 10
STEPS = 24
SIZES = (1, 100, 3000, 40_000)


@dataclass
class Slot:
    """A device tensor, what it must hold, the stream that wrote it last, and those that read it since."""

    device: Tensor
    expected: Tensor
    writer: torch.Stream
    users: list[torch.Stream] = field(default_factory=list)


class Program:
    """One random program, run on the device and, step by step, in host memory."""

    def __init__(self, seed: int, streams: list[torch.Stream]) -> None:
        self.random = random.Random(seed)
        self.streams = streams
        self.slots: dict[int, Slot] = {}
        self.outputs: list[tuple[Tensor, Tensor, torch.Event]] = []

    def run(self) -> list[tuple[Tensor, Tensor]]:
        """Return what the device gave, and what it should have given."""
        steps = (self.bring, self.bring, self.compute, self.compute, self.compute, self.change, self.fetch, self.drop)
        for _ in range(STEPS):
            self.random.choice(steps)()
        for _, _, landed in self.outputs:
            landed.synchronize()
        found = [(got, expected) for got, expected, _ in self.outputs]
        torch.accelerator.synchronize()
        return found + [(slot.device.cpu(), slot.expected) for slot in self.slots.values()]

    def stream(self) -> torch.Stream:
        return self.random.choice(self.streams)

    def pick(self) -> tuple[int, Slot] | None:
        return self.random.choice(list(self.slots.items())) if self.slots else None

    def order(self, later: torch.Stream, earlier: torch.Stream) -> None:
        """Let what is queued on `later` come after what is queued on `earlier`, by any means there is."""
        if later == earlier:
            return
        match self.random.randrange(4):
            case 0:
                later.wait_stream(earlier)
            case 1:
                later.wait_event(earlier.record_event())
            case 2:
                earlier.synchronize()
            case 3:
                event = torch.Event("sim")
                event.record(earlier)
                later.wait_event(event)
                event.record(later)  # the wait above means the first record

    def read(self, slot: Slot, stream: torch.Stream) -> Tensor:
        self.order(stream, slot.writer)
        slot.users.append(stream)
        slot.device.record_stream(stream)
        return slot.device

    def bring(self) -> None:
        """Allocate on one stream, copy into it on that or another."""
        home, stream = self.stream(), self.stream()
        values = torch.randint(0, 100, (self.random.choice(SIZES),), dtype=torch.float32)
        host = values.pin_memory() if self.random.random() < 0.8 else values.clone()
        with home:
            device = torch.empty_like(values, device="sim")
        self.order(stream, home)
        with stream:
            device.copy_(host, non_blocking=True)
        device.record_stream(stream)
        if self.random.random() < 0.3 and host.is_pinned():
            stream.synchronize()
            host.fill_(-1)  # the copy is done: the buffer is the host's again
        self.slots[self.random.randrange(6)] = Slot(device=device, expected=values, writer=stream)

    def compute(self) -> None:
        """Make a new tensor of one or two others."""
        picked, other = self.pick(), self.pick()
        if picked is None or other is None:
            return
        stream, a, b = self.stream(), picked[1], other[1]
        with stream:
            left, right = self.read(a, stream), self.read(b, stream)
            if a.expected.shape == b.expected.shape:
                device, expected = left + right, a.expected + b.expected
            else:
                device, expected = left.flip(0) * 2 + right.sum() % 7, a.expected.flip(0) * 2 + b.expected.sum() % 7
        self.slots[self.random.randrange(6)] = Slot(device=device, expected=expected % 1000, writer=stream)
        with stream:
            device.remainder_(1000)

    def change(self) -> None:
        """Change a tensor in place, after everybody who reads it."""
        picked = self.pick()
        if picked is None:
            return
        slot, stream = picked[1], self.stream()
        for user in [slot.writer, *slot.users]:
            self.order(stream, user)
        with stream:
            slot.device.add_(3)
        slot.device.record_stream(stream)
        slot.expected = slot.expected + 3
        slot.writer, slot.users = stream, []

    def fetch(self) -> None:
        """Copy a tensor to pinned memory, to be looked at when the program ends."""
        picked = self.pick()
        if picked is None:
            return
        stream, slot = self.stream(), picked[1]
        out = torch.empty(slot.expected.shape, pin_memory=True)
        with stream:
            out.copy_(self.read(slot, stream), non_blocking=True)
        self.outputs.append((out, slot.expected, stream.record_event()))

    def drop(self) -> None:
        """Free a tensor while jobs that use it are still queued."""
        if (picked := self.pick()) is not None:
            del self.slots[picked[0]]


def run_programs(seeds: range) -> list[int]:
    """Return the seeds of the programs that gave something else than they should."""
    streams = [torch.Stream("sim") for _ in range(3)] + [torch.accelerator.current_stream()]
    wrong = []
    for seed in seeds:
        torch.manual_seed(seed)
        if not all(torch.equal(got, expected) for got, expected in Program(seed, streams).run()):
            wrong.append(seed)
    return wrong


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_programs_agree_with_a_synchronous_reference(sim: Emulator, batch: int) -> None:
    size = PROGRAMS // BATCHES
    fresh(
        capacity="4MiB" if batch % 2 else "64MiB",  # in the small one allocations wait for blocks in use
        jitter_s=1e-4 * (batch % 3),
        seed=batch,
        poison=True,
        races=batch % 3 == 0,
        h2d_bytes_per_s=2e9,
        d2h_bytes_per_s=2e9,
    )
    assert run_programs(range(batch * size, (batch + 1) * size)) == []
    assert sim.races() == ()
    assert sim.stats().peak_active_bytes <= sim.settings.capacity_bytes


@pytest.mark.parametrize("missing", ["order", "record_stream"])
def test_a_program_that_forgets_some_of_its_synchronisation_is_told_from_a_right_one(
    sim: Emulator, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "order":
        order = Program.order

        def forgetful(self: Program, later: torch.Stream, earlier: torch.Stream) -> None:
            if self.random.random() < 0.9:
                order(self, later, earlier)

        monkeypatch.setattr(Program, "order", forgetful)
    else:
        monkeypatch.setattr(Tensor, "record_stream", lambda _tensor, _stream: None)
    fresh(jitter_s=1e-4, poison=True, h2d_bytes_per_s=2e9, d2h_bytes_per_s=2e9)
    assert run_programs(range(100)) != []
    fresh(races=True)
    run_programs(range(20))
    assert sim.races() != ()
