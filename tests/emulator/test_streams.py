"""Streams, events and copy engines: what runs when, and what goes wrong where nothing says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowtide.emulator import Emulator
from tests.emulator.devices import fresh

MIB = 2**20
COUNT = MIB  # elements: 4 MiB


def pinned(value: float = 0.0) -> Tensor:
    return torch.full((COUNT,), value).pin_memory()


def elapsed_s(work: Callable[[], object]) -> float:
    torch.accelerator.synchronize()
    begin_s = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - begin_s


@pytest.mark.parametrize("rate", [1e8, 4e8])
@pytest.mark.parametrize("to_device", [True, False])
def test_a_copy_takes_as_long_as_the_link_would(sim: Emulator, rate: float, to_device: bool) -> None:
    host, device = pinned(), torch.zeros(COUNT, device="sim")
    knob = {"h2d_bytes_per_s" if to_device else "d2h_bytes_per_s": rate}
    sim.configure(**knob)
    torch.accelerator.synchronize()
    sim.reset_stats()
    took_s = elapsed_s(
        lambda: device.copy_(host, non_blocking=True) if to_device else host.copy_(device, non_blocking=True)
    )
    expected_s = 4 * MIB / rate
    engine = sim.stats().h2d if to_device else sim.stats().d2h
    assert engine.nbytes == 4 * MIB
    assert engine.copies == 1
    # Never faster than the link. How much slower depends on who else uses this machine.
    assert took_s >= engine.busy_s >= expected_s


def test_latency_is_paid_by_each_copy(sim: Emulator) -> None:
    host, device = torch.zeros(1).pin_memory(), torch.zeros(1, device="sim")
    sim.configure(latency_s=0.002)
    assert elapsed_s(lambda: [device.copy_(host, non_blocking=True) for _ in range(5)]) >= 0.01


def test_a_launch_returns_before_its_copy_is_done(sim: Emulator) -> None:
    host, device = pinned(), torch.zeros(COUNT, device="sim")
    sim.configure(h2d_bytes_per_s=4e7)  # 100 ms
    torch.accelerator.synchronize()
    begin_s = time.perf_counter()
    device.copy_(host, non_blocking=True)
    returned_s = time.perf_counter() - begin_s
    done = torch.accelerator.current_stream().record_event()
    assert not done.query()
    done.synchronize()
    assert time.perf_counter() - begin_s >= 0.1 > returned_s


def test_directions_overlap_and_copies_of_one_direction_take_turns(sim: Emulator) -> None:
    sim.configure(h2d_bytes_per_s=4e7, d2h_bytes_per_s=4e7, trace=True)
    streams = [torch.Stream("sim") for _ in range(3)]
    hosts = [pinned() for _ in streams]
    devices = [torch.zeros(COUNT, device="sim") for _ in streams]
    torch.accelerator.synchronize()
    sim.reset_stats()
    for i, stream in enumerate(streams):
        with stream:
            if i < 2:
                devices[i].copy_(hosts[i], non_blocking=True)
            else:
                hosts[i].copy_(devices[i], non_blocking=True)
    torch.accelerator.synchronize()
    into = [r for r in sim.trace() if r.engine == "h2d"]
    (out,) = (r for r in sim.trace() if r.engine == "d2h")
    assert len(into) == 2
    assert into[0].end_s <= into[1].start_s
    assert out.start_s < into[0].end_s


def test_copies_hide_behind_kernels_and_the_statistics_say_how_much(sim: Emulator) -> None:
    side = torch.Stream("sim")
    a, host, device = torch.randn(256, 256).to("sim"), pinned(), torch.zeros(COUNT, device="sim")
    b = a @ a
    sim.configure(h2d_bytes_per_s=1e8, trace=True)
    torch.accelerator.synchronize()
    sim.reset_stats()
    with side:
        device.copy_(host, non_blocking=True)  # 42 ms
    while not side.query():
        torch.mm(a, a, out=b)
        torch.accelerator.current_stream().synchronize()
    stats = sim.stats()
    assert 0 < stats.h2d.hidden_s <= stats.h2d.busy_s
    assert stats.hidden_copy_s == stats.h2d.hidden_s
    assert stats.hidden_copy_s <= stats.compute_s
    # The same from the trace: the kernels' time within the copy.
    (copy,) = (r for r in sim.trace() if r.engine == "h2d")
    kernels = [r for r in sim.trace() if r.engine == "compute" and r.name == "aten::mm"]
    overlap_s = sum(max(0.0, min(r.end_s, copy.end_s) - max(r.start_s, copy.start_s)) for r in kernels)
    assert stats.h2d.hidden_s == pytest.approx(overlap_s, rel=0.01, abs=1e-4)


def test_nothing_is_hidden_when_nothing_is_computed(sim: Emulator) -> None:
    sim.configure(h2d_bytes_per_s=1e9)
    torch.zeros(COUNT).pin_memory().to("sim", non_blocking=True)
    torch.accelerator.synchronize()
    assert sim.stats().h2d.busy_s > 0
    assert sim.stats().hidden_copy_s == 0


def test_the_trace_names_what_ran_and_only_while_it_is_on(sim: Emulator) -> None:
    x = torch.ones(64, 64, device="sim")
    sim.configure(trace=True)
    (x @ x).cpu()
    sim.configure(trace=False)
    (x + x).cpu()
    names = [record.name for record in sim.trace()]
    assert "aten::mm" in names
    assert "copy d2h" in names
    assert not any("add" in name for name in names)
    assert all(record.end_s >= record.start_s for record in sim.trace())
    sim.reset_stats()
    assert sim.trace() == []


def test_slowdown_multiplies_the_time_of_kernels(sim: Emulator) -> None:
    x = torch.randn(512, 512).to("sim")
    y = x @ x

    def busy_s() -> float:
        torch.accelerator.synchronize()
        sim.reset_stats()
        for _ in range(10):
            torch.mm(x, x, out=y)
        torch.accelerator.synchronize()
        return sim.stats().compute_s

    busy_s()
    plain_s = min(busy_s() for _ in range(3))
    sim.configure(slowdown=4.0)
    assert busy_s() > 2.5 * plain_s


def test_events_tell_the_time_of_the_device(sim: Emulator) -> None:
    sim.configure(h2d_bytes_per_s=4e7)
    first, second = (torch.Event("sim", enable_timing=True) for _ in range(2))
    host, device = pinned(), torch.zeros(COUNT, device="sim")
    first.record()
    device.copy_(host, non_blocking=True)
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= 1000 * 4 * MIB / 4e7


def test_a_later_record_of_an_event_changes_no_earlier_wait(sim: Emulator) -> None:
    sim.configure(h2d_bytes_per_s=4e7)
    busy, waiting = torch.Stream("sim"), torch.Stream("sim")
    event = torch.Event("sim")
    with busy:
        event.record()  # at once
    waiting.wait_event(event)
    with busy:
        torch.zeros(COUNT, device="sim").copy_(pinned(), non_blocking=True)
        event.record()  # in 100 ms
    begin_s = time.perf_counter()
    waiting.synchronize()
    assert time.perf_counter() - begin_s < 0.1
    assert not event.query()
    event.synchronize()


def test_the_host_runs_ahead_only_as_far_as_the_queue_is_deep(sim: Emulator) -> None:
    x, host = torch.zeros(COUNT, device="sim"), pinned()
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    sim.configure(h2d_bytes_per_s=4e7, queue_depth=4)
    torch.accelerator.synchronize()
    x.copy_(host, non_blocking=True)  # 100 ms
    begin_s = time.perf_counter()
    for _ in range(3):
        torch.add(x, 1, out=y)
    ahead_s = time.perf_counter() - begin_s
    torch.add(x, 1, out=y)
    assert time.perf_counter() - begin_s > 0.05 > ahead_s


def test_what_others_queue_behind_a_job_on_the_hosts_thread_waits_for_it(sim: Emulator) -> None:
    begun, go_on = threading.Event(), threading.Event()

    @torch.library.custom_op("lowtide_tests::held_up", mutates_args=(), device_types="cpu")
    def held_up(x: Tensor) -> Tensor:
        begun.set()
        go_on.wait(30)
        return x + 1

    x, results = torch.zeros(10, device="sim"), []
    thread = threading.Thread(target=lambda: results.append(held_up(x)))  # a first call: it runs on this thread
    thread.start()
    assert begun.wait(30)
    event = torch.accelerator.current_stream().record_event()
    side = torch.Stream("sim")
    side.wait_event(event)
    assert not event.query()
    assert not side.query()
    go_on.set()
    thread.join()
    side.synchronize()
    assert event.query()
    assert results[0].sum().item() == 10


# ---- what a missing synchronisation does ----


def reads_too_early_on_the_host() -> tuple[Tensor, Tensor]:
    out = pinned()
    out.copy_(torch.ones(COUNT, device="sim"), non_blocking=True)
    return out.clone(), torch.ones(COUNT)


def does_not_wait_for_the_copy_in() -> tuple[Tensor, Tensor]:
    side = torch.Stream("sim")
    x = torch.empty(COUNT, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.copy_(pinned(2.0), non_blocking=True)
    return (x * 2).cpu(), torch.full((COUNT,), 4.0)


def does_not_record_the_stream() -> tuple[Tensor, Tensor]:
    side, out = torch.Stream("sim"), pinned()
    x = torch.ones(COUNT, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        out.copy_(x, non_blocking=True)
    freed = x.data_ptr()
    del x
    others: list[Tensor] = []
    while freed not in [other.data_ptr() for other in others]:  # until somebody gets the block
        others.append(torch.full((COUNT,), 7.0, device="sim"))
    torch.accelerator.synchronize()
    return out, torch.ones(COUNT)


def does_not_wait_for_the_kernel() -> tuple[Tensor, Tensor]:
    side, out = torch.Stream("sim"), pinned()
    x = torch.ones(COUNT, device="sim")
    torch.accelerator.synchronize()
    for _ in range(20):
        x = x * 1.25  # another value each time: what an earlier round left in memory is wrong as well
    with side:
        out.copy_(x, non_blocking=True)
    torch.accelerator.synchronize()
    return out, torch.full((COUNT,), 1.25**20)


MISTAKES = [
    reads_too_early_on_the_host,
    does_not_wait_for_the_copy_in,
    does_not_record_the_stream,
    does_not_wait_for_the_kernel,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_missing_synchronisation_gives_wrong_data(
    sim: Emulator, mistake: Callable[[], tuple[Tensor, Tensor]]
) -> None:
    mistake()  # the first call of an operator runs at once; what is wrong shows from the second on
    torch.accelerator.synchronize()
    wrong = 0
    for seed in range(5):
        # A copy takes 42 ms: the host would have to be held up for as long to be right by luck.
        fresh(jitter_s=2e-3, seed=seed, poison=True, h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
        got, expected = mistake()
        torch.accelerator.synchronize()
        wrong += not torch.equal(got, expected)
    assert wrong >= 4


@pytest.mark.parametrize(
    ("mistake", "sides"),
    [
        (reads_too_early_on_the_host, ("copy d2h of 4.00 MiB", "host read of a pinned buffer by aten::copy_")),
        (does_not_wait_for_the_copy_in, ("copy h2d of 4.00 MiB", "aten::mul")),
        (does_not_record_the_stream, ("copy d2h of 4.00 MiB", "freed")),
        (does_not_wait_for_the_kernel, ("aten::mul", "copy d2h of 4.00 MiB")),
    ],
)
def test_the_race_detector_names_both_sides_of_a_missing_synchronisation_every_time(
    sim: Emulator, mistake: Callable[[], tuple[Tensor, Tensor]], sides: tuple[str, str]
) -> None:
    for _ in range(5):
        fresh(races=True)  # no jitter, no slow link: the data may well be right
        mistake()
        torch.accelerator.synchronize()
        found = sim.races()
        assert found
        assert any(all(side in line for side in sides) for line in found), found
        assert sim.races() == ()
