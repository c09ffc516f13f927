"""Device memory: a hard bound, honest counters, blocks that are free when their streams say so."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.emulator import Emulator
from tests import models

MIB = 2**20


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="sim")


def test_an_allocation_beyond_the_capacity_is_refused_with_numbers(sim: Emulator) -> None:
    sim.configure(capacity="64MiB")
    held = block(48 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20\.00 MiB.*capacity of 64\.00 MiB"):
        block(20 * MIB)
    assert sim.stats().out_of_memory == 1
    del held
    assert block(64 * MIB).nbytes == 64 * MIB


def test_the_peak_never_passes_the_capacity(sim: Emulator) -> None:
    sim.configure(capacity="16MiB")
    held = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            held.append(block(3 * MIB + 5))
    assert len(held) == 5
    assert sim.stats().peak_active_bytes <= 16 * MIB


def activations(width: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return models.mlp(width=width, depth=6).to("sim"), torch.randn(2048, width).to("sim")


def test_backward_raises_out_of_memory_too_and_the_model_stays_usable(sim: Emulator) -> None:
    model, x = activations(64)
    loss = model(x).square().mean()
    # Room for nothing: the first gradient already is too much.
    sim.configure(capacity=sim.stats().active_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    sim.configure(capacity="256MiB")
    for parameter in model.parameters():
        parameter.grad = None
    model(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_kernels_scratch_counts_whether_it_runs_at_once_or_later(sim: Emulator) -> None:
    # In double precision the CPU's convolution writes out a matrix of 9 copies of its input.
    model = nn.Conv2d(8, 8, 3, padding=1, bias=False).double().to("sim")
    x = torch.randn(2, 8, 40, 40, dtype=torch.double).to("sim")
    with torch.no_grad():
        for _ in range(2):
            torch.accelerator.synchronize()
            sim.reset_stats()
            before = sim.stats().active_bytes
            y = model(x)
            torch.accelerator.synchronize()
            assert sim.stats().peak_active_bytes - before >= y.nbytes + 9 * x.nbytes
            assert sim.stats().active_bytes - before == y.nbytes
            del y


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("train", [True, False])
def test_batch_norms_backward_takes_the_memory_of_its_result_once_and_gives_the_cpus_bits(
    sim: Emulator, layout: torch.memory_format, train: bool
) -> None:
    values = torch.randn(4, 16, 24, 24).to(memory_format=layout)
    gradient = torch.randn_like(values)

    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.BatchNorm2d(16).train(train).to(device)
        x = values.clone().to(device).requires_grad_()
        y = model(x)
        passed = gradient.to(device)
        if device == "sim":
            torch.accelerator.synchronize()
            sim.reset_stats()
            before = sim.stats().active_bytes
        y.backward(passed)
        if device == "sim":
            torch.accelerator.synchronize()
            assert sim.stats().peak_active_bytes - before < 1.5 * x.nbytes
        found = [x.grad, model.weight.grad, model.bias.grad]
        return [one.cpu() for one in found if one is not None]

    expected = gradients("cpu")
    for _ in range(3):  # the first runs at once, the others later
        got = gradients("sim")
        assert len(got) == len(expected) == 3
        for one, other in zip(got, expected, strict=True):
            assert one.stride() == other.stride()
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16])
def test_batch_norms_backward_of_other_types_and_layouts_gives_the_cpus_bits(sim: Emulator, dtype: torch.dtype) -> None:
    values = torch.randn(4, 6, 10, 5).to(dtype)

    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.BatchNorm2d(6).to(dtype).to(device)
        x = values.clone().to(device).requires_grad_()
        model(x.transpose(2, 3)).mul(2).transpose(2, 3).pow(2).sum().backward()
        assert x.grad is not None
        assert model.weight.grad is not None
        return [x.grad.cpu(), model.weight.grad.cpu()]

    for one, other in zip(gradients("sim"), gradients("cpu"), strict=True):
        assert torch.equal(one, other)


def test_freed_memory_is_live_no_more_and_peaks_are_kept_until_reset(sim: Emulator) -> None:
    gc.collect()
    torch.accelerator.synchronize()
    sim.reset_stats()
    before = sim.stats().live_bytes
    held = block(8 * MIB)
    assert sim.stats().live_bytes == before + 8 * MIB == torch.accelerator.memory_allocated()
    del held
    stats = sim.stats()
    assert stats.live_bytes == before
    assert stats.peak_bytes == before + 8 * MIB
    sim.reset_stats()
    assert sim.stats().peak_bytes == before


def test_memory_info_and_statistics_of_torch_agree(sim: Emulator) -> None:
    held = block(4 * MIB)
    free, total = torch.accelerator.get_memory_info()
    assert total == sim.settings.capacity_bytes
    assert total - free == sim.stats().active_bytes
    stats = torch.accelerator.memory_stats()
    assert stats["allocated_bytes.all.current"] == sim.stats().live_bytes
    assert stats["requested_bytes.all.current"] <= stats["allocated_bytes.all.current"]
    del held


def test_a_block_used_by_another_stream_is_not_reused_before_that_stream_is_done(sim: Emulator) -> None:
    sim.configure(h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
    side = torch.Stream("sim")
    x = torch.full((MIB,), 3.0, device="sim")
    out = torch.empty(MIB, pin_memory=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        out.copy_(x, non_blocking=True)  # 40 ms
    x.record_stream(side)
    address = x.data_ptr()
    del x
    assert sim.stats().active_bytes - sim.stats().live_bytes == 4 * MIB
    other = torch.full((MIB,), 5.0, device="sim")
    assert other.data_ptr() != address
    side.synchronize()
    assert torch.equal(out, torch.full((MIB,), 3.0))


def test_an_allocation_waits_for_blocks_that_a_stream_still_uses_before_it_gives_up(sim: Emulator) -> None:
    sim.configure(capacity="6MiB", d2h_bytes_per_s=1e8)
    side = torch.Stream("sim")
    x = torch.full((MIB,), 3.0, device="sim")
    out = torch.empty(MIB, pin_memory=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        out.copy_(x, non_blocking=True)
    x.record_stream(side)
    del x
    other = torch.full((MIB,), 5.0, device="sim")
    assert torch.equal(out, torch.full((MIB,), 3.0))
    assert sim.stats().peak_active_bytes <= 6 * MIB
    assert other.sum().item() == 5.0 * MIB


def test_the_pressure_callback_is_asked_for_what_is_missing_and_the_allocation_tried_again(sim: Emulator) -> None:
    sim.configure(capacity="16MiB")
    held = {"a": block(6 * MIB), "b": block(6 * MIB)}
    asked: list[tuple[int, int]] = []

    def give_one_up(device: int, need_bytes: int) -> bool:
        asked.append((device, need_bytes))
        return held.popitem() is not None if held else False

    sim.set_pressure_callback(give_one_up)
    more = block(8 * MIB)
    assert asked == [(0, 4 * MIB)]
    with pytest.raises(torch.OutOfMemoryError):
        block(17 * MIB)
    assert not held
    assert asked[-1] == (0, 9 * MIB)  # the last one got nothing more, and the allocation was refused
    del more


def test_the_pressure_callback_may_come_from_autograds_thread(sim: Emulator) -> None:
    model, x = activations(64)
    ballast = [block(32 * MIB)]
    loss = model(x).square().mean()
    sim.configure(capacity=sim.stats().active_bytes)
    sim.set_pressure_callback(lambda _device, _need: bool(ballast) and ballast.pop() is not None)
    loss.backward()
    assert not ballast


def test_the_pressure_callback_may_copy_wait_and_allocate_host_memory_in_the_middle_of_a_kernel(sim: Emulator) -> None:
    ballast = [torch.full((2 * MIB,), 3.0, device="sim")]
    x = torch.randn(77, 1033).to("sim")
    saved: list[torch.Tensor] = []

    def write_out(_device: int, _need: int) -> bool:
        if not ballast:
            return False
        side, main = torch.Stream("sim"), torch.accelerator.current_stream()
        side.wait_event(main.record_event())
        out = torch.empty(2 * MIB, pin_memory=True)
        with side:
            out.copy_(ballast[0], non_blocking=True)
        side.record_event().synchronize()
        main.synchronize()
        saved.append(out + torch.zeros(2 * MIB))
        ballast.clear()
        return True

    sim.set_pressure_callback(write_out)
    torch.accelerator.synchronize()
    sim.configure(capacity=sim.stats().active_bytes)
    values = x.sort(dim=1)[0]  # the first sort of this shape: it runs on the host's thread and takes its memory there
    assert torch.equal(saved[0], torch.full((2 * MIB,), 3.0))
    assert saved[0].device.type == "cpu"
    assert torch.equal(values.cpu(), x.cpu().sort(dim=1)[0])


def test_fragmentation_is_a_knob(sim: Emulator) -> None:
    def checkerboard() -> list[torch.Tensor]:
        torch.accelerator.empty_cache()
        held = [block(2 * MIB) for _ in range(8)]
        return held[::2]

    sim.configure(capacity="16MiB")
    held = checkerboard()
    assert block(8 * MIB).nbytes == 8 * MIB
    del held
    sim.configure(fragmentation=True)
    held = checkerboard()
    with pytest.raises(torch.OutOfMemoryError):
        block(8 * MIB)
    del held


def test_new_memory_is_poisoned(sim: Emulator) -> None:
    sim.configure(poison=True)
    assert torch.empty(1000, device="sim").isnan().all()
    assert torch.empty(1000, dtype=torch.bfloat16, device="sim").isnan().all()


def test_storages_grow_shrink_and_are_emptied(sim: Emulator) -> None:
    x = torch.arange(1000, dtype=torch.float32).to("sim")
    x.resize_(2000)
    assert torch.equal(x[:1000].cpu(), torch.arange(1000, dtype=torch.float32))
    before = sim.stats().live_bytes
    x.untyped_storage().resize_(0)
    assert sim.stats().live_bytes < before
    x.untyped_storage().resize_(8000)
    x.fill_(2)
    assert x.sum().item() == 4000


def test_long_runs_of_changing_sizes_keep_no_more_pages_than_the_device_has(sim: Emulator) -> None:
    sim.configure(capacity="64MiB")
    before = resident_bytes()
    generator = torch.Generator().manual_seed(0)
    held: list[torch.Tensor] = []
    for i in range(600):
        nbytes = int(torch.randint(1, 12 * MIB, (), generator=generator))
        while sum(t.nbytes for t in held) + nbytes > 60 * MIB:
            held.pop(int(torch.randint(len(held), (), generator=generator)))
        held.append(block(nbytes).fill_(i % 255))
    torch.accelerator.synchronize()
    assert resident_bytes() - before < 3 * 64 * MIB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
