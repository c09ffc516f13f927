"""Budgets of devices: how they are stated, and that no training ever passes one."""

from __future__ import annotations

import gc
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.execute.backends.accelerator.backend import AcceleratorBackend
from lowtide.memory.budget import Budgets, names_accelerator, parse_device_budget
from lowtide.tiers.file import FileMedium
from tests.accelerator.devices import CAPACITY_BYTES, NAME, shake
from tests.accelerator.devices import device as the_device

GIB = 2**30


def parse(budget: Any) -> Budgets:
    return parse_device_budget(budget, free_bytes=lambda: 70 * GIB, held_bytes=10 * GIB)


def test_every_tier_can_be_stated() -> None:
    assert parse(7) == Budgets(fast_bytes=7)
    assert parse("6GiB") == Budgets(fast_bytes=6 * GIB)
    assert parse({"device": "6GiB", "cpu": "8GiB", "disk": "100GiB"}) == Budgets(
        fast_bytes=6 * GIB, host_bytes=8 * GIB, disk_bytes=100 * GIB
    )
    assert parse({"cuda:0": "1GiB", "cuda:1": "2GiB"}) == Budgets(
        fast_bytes=2 * GIB, devices=(("cuda:0", GIB), ("cuda:1", 2 * GIB))
    )


def test_auto_is_what_the_device_leaves_with_what_it_holds_less_a_margin() -> None:
    assert parse("auto").fast_bytes == 72 * GIB
    assert parse({"device": " AUTO "}).fast_bytes == 72 * GIB


@pytest.mark.parametrize(
    ("bad", "hint"),
    [
        ({"cpu": "2GiB"}, "names no 'device' bytes"),
        ({"device": "1GiB", "gpu": "2GiB"}, "unknown tier 'gpu'"),
        ({"device": 0}, "more than zero"),
        ({"cuda:0": "2G"}, "GiB (binary) or GB (decimal)"),
        ({"device": "1GiB", "cpu": -1}, "more than zero"),
        ({"device": None}, "pass an int or a text"),
    ],
)
def test_nonsense_is_refused_in_one_line(bad: Any, hint: str) -> None:
    with pytest.raises(BadArgument) as refused:
        parse(bad)
    assert hint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_budget_names_an_accelerator_or_not() -> None:
    assert names_accelerator({"device": 1})
    assert names_accelerator({"cuda:1": 1, "cpu": 2})
    assert not names_accelerator({"cpu": 1, "disk": 2})
    assert not names_accelerator("2GiB")


# ---- which device ----


def test_a_model_on_the_device_is_trained_there(device: torch.device, tmp_path: Path) -> None:
    with lowtide.fit(nn.Linear(8, 8).to(device), budget="64MiB", spill=tmp_path) as tide:
        assert tide.stats()["device"] == f"{NAME}:0"
        assert tide.stats()["budget_exact"]


@pytest.mark.parametrize("budget", [{f"{NAME}:0": "64MiB", f"{NAME}:1": "32MiB"}, {"device": "64MiB"}])
def test_a_budget_for_each_device_is_the_one_of_the_models_device(
    budget: dict[str, str], device: torch.device, tmp_path: Path
) -> None:
    with lowtide.fit(nn.Linear(8, 8).to(device), budget=budget, spill=tmp_path) as tide:
        assert tide.stats()["budget_bytes"] == 64 << 20


@pytest.mark.parametrize(
    ("budget", "there", "hint"),
    [
        ({"cpu": "64MiB"}, True, "names no 'device' bytes"),
        ({"device": "64MiB"}, False, "the model is on the CPU"),
        ({f"{NAME}:1": "64MiB"}, True, f"but the model is on {NAME}:0"),
        ({"device": 1 << 60}, True, "is more than"),
    ],
)
def test_a_budget_for_another_place_is_refused(
    budget: dict[str, int | str], there: bool, hint: str, device: torch.device, tmp_path: Path
) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(BadArgument, match=hint):
        lowtide.fit(model.to(device) if there else model, budget=budget, spill=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_budget_below_what_exists_already_is_refused(device: torch.device, tmp_path: Path) -> None:
    kept = torch.zeros(1 << 20, device=device)
    with pytest.raises(BudgetTooSmall, match="take that much already"):
        lowtide.fit(budget={"device": kept.nbytes - 4096}, spill=tmp_path)
    torch.zeros(1 << 20, device=device)  # nobody limits the device any more


# ---- no training passes its budget ----


def build(widths: list[int], *, batch: int, norm: bool) -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), *([nn.BatchNorm1d(after)] if norm else []), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers), torch.randn(batch, widths[0])


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    widths=st.lists(st.integers(16, 256), min_size=3, max_size=8),
    batch=st.integers(64, 1024),
    norm=st.booleans(),
    share=st.floats(0.2, 1.1),
    host_kib=st.sampled_from([512, 2048, 65536]),
    policy=st.sampled_from(["auto", "lru", "swap_all", "belady"]),
    seed=st.integers(0, 1000),
)
def test_the_devices_own_peak_never_passes_the_budget_and_results_are_exact(
    widths: list[int], batch: int, norm: bool, share: float, host_kib: int, policy: str, seed: int
) -> None:
    device = the_device()

    def train(tide: lowtide.Tide | None, model: nn.Module, x: torch.Tensor) -> list[bytes]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        seen = []
        for _ in range(3):
            if tide is None:
                loss = model(x).square().mean()
                loss.backward()
            else:
                with tide.step():
                    loss = model(x).square().mean()
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().cpu().numpy().tobytes())
        return seen + [p.detach().cpu().numpy().tobytes() for p in model.parameters()]

    def fresh() -> tuple[nn.Module, torch.Tensor]:
        gc.collect()
        torch.manual_seed(seed)
        model, x = build(widths, batch=batch, norm=norm)
        return model.to(device), x.to(device)

    model, x = fresh()
    before_bytes = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    expected = train(None, model, x)
    peak_bytes = torch.accelerator.max_memory_allocated(device)
    del model, x
    budget_bytes = int(before_bytes + share * (peak_bytes - before_bytes))
    model, x = fresh()
    shake(seed)
    try:
        with tempfile.TemporaryDirectory() as spill:
            with lowtide.fit(
                model, budget={"device": budget_bytes, "cpu": host_kib << 10}, spill=spill, policy=policy
            ) as tide:
                found = train(tide, model, x)
                stats = tide.stats()
        assert found == expected
        assert int(str(stats["peak_bytes"])) <= int(str(stats["peak_reserved_bytes"])) <= budget_bytes
        assert int(str(stats["host_peak_bytes"])) <= host_kib << 10
    except (BudgetTooSmall, torch.OutOfMemoryError) as error:
        # Between steps nobody gives the allocator's own error another name.
        assert share < 1.0, f"all fits, but {error}"
        assert torch.accelerator.max_memory_allocated(device) <= max(budget_bytes, peak_bytes)
        error.__traceback__ = None
    finally:
        torch.accelerator.synchronize()
        shake(None)
    assert CAPACITY_BYTES > 0


def test_room_is_made_though_another_thread_takes_what_was_given_up(tmp_path: Path) -> None:
    """As where backward's threads for two devices both allocate on this one."""
    device, nbytes = the_device(), 2 << 20
    backend = AcceleratorBackend(FileMedium([tmp_path]), device=device, host_bytes=16 << 20)
    records = []
    theirs: list[torch.Tensor] = []

    def on_pressure(_need_bytes: int) -> int:
        backend.events()
        if records:
            assert backend.write(records.pop(0), nbytes)
            if not theirs:  # what is live is the same after this round as before
                with backend._lock:
                    backend._land(nbytes)
                theirs.append(torch.zeros(nbytes // 4, device=device))
        return 0

    gc.collect()
    packs = [backend.pack(torch.ones(nbytes // 4, device=device)) for _ in range(3)]
    records = [packed.record for packed in packs]
    backend.open(budget_bytes=torch.accelerator.memory_allocated(device), on_pressure=on_pressure)
    try:
        assert backend.make_room(nbytes)
        assert len(theirs) == 1
        assert len(records) == 1, "one for them, one for us"
        assert not backend.make_room(4 * nbytes), "three at most: nothing more can leave"
    finally:
        for packed in packs:
            backend.close_pack(packed.pack)
        backend.close(bring_back=False)
