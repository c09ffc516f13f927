"""A model spread over several devices of one process trains to the bit, inside each device's own budget."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import capture_step
from lowtide.core.trace import Phase
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.execute.backends.accelerator.order import on_stream
from lowtide.execute.tide.script import run_script
from lowtide.plan.policy import Policy
from tests.accelerator.devices import IS_EMULATED, NAME, races, shake
from tests.accelerator.split import BOTH, FIRST, SECOND, Outcome, batch, build, managed, needs, stock, tight, train
from tests.accelerator.test_guard import crowded
from tests.bitwise.discard_all import DiscardAll
from tests.bitwise.record import Record, assert_identical

MIB = 1 << 20
SLOW = pytest.mark.slow
# A link on which copies take longer than computing again.
SLOW_LINK = {"d2h_bytes_per_s": 50e6, "h2d_bytes_per_s": 50e6}


@pytest.fixture(autouse=True)
def two_devices(device: torch.device) -> Iterator[None]:
    """Skip where there is one device only; nothing of a tide may be left on any of them."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("one device only")
    gc.freeze()  # makes every collection below cheap
    lending = torch.Tensor.numpy, torch.UntypedStorage.resize_
    yield
    gc.collect()
    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.accelerator.current_device_index() == 0
    assert (torch.Tensor.numpy, torch.UntypedStorage.resize_) == lending
    for name in BOTH:
        torch.empty(256 * MIB, dtype=torch.uint8, device=name)  # nobody limits it any more


def assert_exact(outcome: Outcome, budget: dict[str, int]) -> None:
    assert_identical(stock(), outcome.record)
    assert outcome.races == ()
    for name in BOTH:
        there = outcome.on(name)
        assert there["peak_bytes"] <= there["peak_reserved_bytes"] <= there["budget_bytes"] == budget[name]
        assert there["budget_exact"]


# ---- exact, within every budget ----


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        ("auto", 1),
        ("swap_all", 2),
        ("lru", 3),
        *(pytest.param(policy, seed, marks=SLOW) for policy in ("auto", "swap_all", "lru") for seed in range(4, 12)),
    ],
)
def test_training_on_two_devices_is_exact_within_both_budgets(policy: str, seed: int, tmp_path: Path) -> None:
    budget = tight()
    outcome = managed(budget, spill=tmp_path, policy=policy, seed=seed, watch_races=True, verify=seed % 2 == 0)
    assert_exact(outcome, budget)
    for name in BOTH:
        assert budget[name] < needs()[name].peak_bytes, "nothing presses: this test shows nothing"
        assert outcome.on(name)["swapped_in_bytes"] > 0


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        ("capuchin", None),
        *(pytest.param(policy, seed, marks=SLOW) for policy in ("dtr", DiscardAll(once=True)) for seed in range(5, 12)),
    ],
)
def test_operators_run_again_on_either_device(policy: str | Policy, seed: int | None, tmp_path: Path) -> None:
    budget = tight()
    knobs = SLOW_LINK if policy == "capuchin" and IS_EMULATED else None
    outcome = managed(budget, spill=tmp_path, policy=policy, recompute=True, seed=seed, knobs=knobs, watch_races=True)
    assert_exact(outcome, budget)
    for name in BOTH:
        assert outcome.on(name)["recomputed_ops"] > 0


@SLOW
def test_what_would_be_made_from_the_other_device_is_swapped(tmp_path: Path) -> None:
    """On the second device all recipes begin with a copy from the first, unless they may use what was made before."""
    budget = tight()
    outcome = managed(budget, spill=tmp_path, policy=DiscardAll(once=False), seed=8, watch_races=True)
    assert_exact(outcome, budget)
    assert outcome.on(FIRST)["recomputed_ops"] > 0
    assert outcome.on(SECOND)["recomputed_ops"] == 0
    assert outcome.on(SECOND)["swapped_in_bytes"] > 0


def test_a_device_with_room_keeps_everything(tmp_path: Path) -> None:
    budget = {**tight(), SECOND: 128 * MIB}
    outcome = managed(budget, spill=tmp_path, seed=4, watch_races=True)
    assert_exact(outcome, budget)
    assert outcome.on(FIRST)["swapped_out_bytes"] > 0
    assert outcome.on(SECOND)["swapped_out_bytes"] == 0


def test_what_is_below_the_devices_is_bounded_in_sum(tmp_path: Path) -> None:
    host_bytes, disk_bytes = 3 * MIB, 64 * MIB
    budget = tight()
    model, optimizer = build()
    stated = {**budget, "cpu": host_bytes, "disk": disk_bytes}
    with lowtide.fit(model, optimizer, budget=stated, spill=tmp_path) as tide:
        capacities = [one._backend._host.store.medium.capacity_bytes for one in tide._tides.values()]  # type: ignore[attr-defined]
    del model, optimizer, tide
    assert 0.99 * disk_bytes < sum(capacities) <= disk_bytes
    outcome = managed(stated, spill=tmp_path, policy="swap_all", seed=7, verify=True)
    assert_exact(outcome, budget)
    assert outcome.stats["host_peak_bytes"] <= outcome.stats["host_budget_bytes"] <= host_bytes
    shares = [outcome.on(name)["host_budget_bytes"] / budget[name] for name in BOTH]
    assert shares[0] == pytest.approx(shares[1], rel=0.05)
    assert outcome.stats["disk_written_bytes"] > 0


# ---- how budgets are stated ----


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("32MiB", (32, 32)),
        ({"device": "32MiB"}, (32, 32)),
        ({"device": "32MiB", SECOND: "16MiB"}, (32, 16)),
        ({FIRST: "24MiB", SECOND: "16MiB"}, (24, 16)),
    ],
)
def test_a_budget_is_for_each_device(budget: Any, expected: tuple[int, int], tmp_path: Path) -> None:
    model, optimizer = build()
    with lowtide.fit(model, optimizer, budget=budget, spill=tmp_path) as tide:
        stats: dict[str, Any] = tide.stats()
    assert tuple(stats["devices"][name]["budget_bytes"] // MIB for name in BOTH) == expected
    assert stats["budget_bytes"] == sum(expected) * MIB


def test_auto_is_what_each_device_has_left(tmp_path: Path) -> None:
    model, optimizer = build()
    ballast = torch.zeros(64 * MIB, dtype=torch.uint8, device=SECOND)
    with lowtide.fit(model, optimizer, budget="auto", spill=tmp_path) as tide:
        stats: dict[str, Any] = tide.stats()
    first, second = (stats["devices"][name]["budget_bytes"] for name in BOTH)
    assert first - second == pytest.approx(0.9 * ballast.nbytes, rel=0.05)


@pytest.mark.parametrize(
    ("budget", "hint"),
    [
        ({FIRST: "32MiB"}, f"but the model is on {SECOND}: state '{SECOND}' or 'device' bytes"),
        ({FIRST: "32MiB", SECOND: 1 << 60}, f"is more than {SECOND} has"),
        ({"cpu": "32MiB"}, "names no 'device' bytes"),
    ],
)
def test_a_budget_that_does_not_fit_the_devices_is_refused_in_one_line(budget: Any, hint: str, tmp_path: Path) -> None:
    model, _ = build()
    with pytest.raises(BadArgument) as refused:
        lowtide.fit(model, budget=budget, spill=tmp_path)
    assert hint in str(refused.value)
    assert "\n" not in str(refused.value)
    lowtide.fit(model, budget="32MiB", spill=tmp_path).close()  # nothing was left open


def test_an_open_tier_is_not_shared(tmp_path: Path) -> None:
    from lowtide.tiers.open import open_medium

    model, _ = build()
    medium = open_medium(tmp_path)
    with pytest.raises(BadArgument, match="cannot be shared by 2 devices"):
        lowtide.fit(model, budget="32MiB", spill=medium)
    medium.close()


# ---- answers ----


def test_answers_are_given_in_sum_and_by_device(tmp_path: Path) -> None:
    model, optimizer = build()
    with lowtide.fit(model, optimizer, budget=tight(), spill=tmp_path) as tide:
        for index in range(3):
            with tide.step():
                model(batch(index)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        stats: dict[str, Any] = tide.stats()
        by_device = stats["devices"]
        for name in ("peak_bytes", "swapped_out_bytes", "static_bytes", "planned_swaps"):
            assert stats[name] == sum(by_device[device][name] for device in BOTH)
        assert (stats["steps"], stats["policy"], list(by_device)) == (3, "auto", list(BOTH))
        assert stats["unmanaged"] == {}, "tensors of the other device are its own to manage"
        assert repr(tide).startswith(f"<Tide: budget {FIRST} ")
        assert f"{SECOND} " in repr(tide)
        for device in BOTH:
            plan = tide.plan(device)
            assert plan is not None
            assert len(plan.swaps) == by_device[device]["planned_swaps"]
            assert tide.trace(device).peak_bytes == pytest.approx(needs()[device].peak_bytes, rel=0.2)
            assert tide.machine_of(device).name == device
        for ask in (tide.trace, tide.plan, tide.machine_of, lambda: tide.machine):
            with pytest.raises(BadArgument, match=f"is on {FIRST}, {SECOND}"):
                ask()
        with pytest.raises(BadArgument, match="nothing to tell of 'moon:0'"):
            tide.trace("moon:0")
    assert repr(tide).endswith("closed>")


def test_a_step_is_captured_on_either_device() -> None:
    model, optimizer = build()

    def step() -> None:
        model(batch(0).repeat(4, 1)).square().mean().backward()  # what is small is not recorded
        optimizer.zero_grad()

    for name in BOTH:
        trace = capture_step(step, model=model, optimizer=optimizer, device=name)
        modules = {op.module.partition(".")[0] for op in trace.ops if op.phase is Phase.FORWARD}
        assert ("right" in modules, "stem" in modules) == (name == SECOND, name == FIRST)


def test_a_tide_on_one_device_knows_no_other(tmp_path: Path) -> None:
    with lowtide.fit(torch.nn.Linear(4, 4).to(FIRST), budget="32MiB", spill=tmp_path) as tide:
        assert tide.plan(FIRST) is None
        assert "devices" not in tide.stats()
        with pytest.raises(BadArgument, match=f"this tide is on {FIRST}"):
            tide.plan(SECOND)


# ---- what goes wrong ----


@pytest.mark.parametrize("poor", BOTH)
def test_too_small_a_budget_names_its_device_and_the_model_stays_usable(poor: str, tmp_path: Path) -> None:
    model, optimizer = build()
    held_bytes = torch.accelerator.memory_allocated(torch.device(poor))
    with lowtide.fit(model, optimizer, budget={"device": 64 * MIB, poor: held_bytes + 8192}, spill=tmp_path) as tide:
        with pytest.raises(BudgetTooSmall, match=f" of {poor} cannot run ") as raised:
            with tide.step():
                model(batch(0)).square().mean().backward()
        assert raised.value.device == poor
        assert raised.value.budget_bytes == held_bytes + 8192
    del raised
    model.zero_grad()
    model.load_state_dict(build()[0].state_dict())  # running statistics: forward had come some way
    record = Record()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), record)
    assert_identical(stock(), record)


def test_a_budget_below_what_exists_on_the_second_device_leaves_the_first_alone(tmp_path: Path) -> None:
    model, _ = build()
    with pytest.raises(BudgetTooSmall, match="take that much already") as raised:
        lowtide.fit(model, budget={FIRST: "32MiB", SECOND: 4096}, spill=tmp_path)
    assert raised.value.device == SECOND
    lowtide.fit(model, budget="32MiB", spill=tmp_path).close()


def test_what_the_program_caught_on_one_device_is_not_blamed_for_the_other(tmp_path: Path) -> None:
    model, _ = build()
    with lowtide.fit(model, budget="16MiB", spill=tmp_path) as tide:
        with pytest.raises(BudgetTooSmall) as raised:
            with tide.step():
                for name in reversed(BOTH):
                    try:
                        torch.empty(32 * MIB, dtype=torch.uint8, device=name)
                    except torch.OutOfMemoryError:
                        if name == FIRST:
                            raise
        assert raised.value.device == FIRST


def test_an_exception_in_a_step_leaves_everything_as_it_was(tmp_path: Path) -> None:
    model, optimizer = build()
    outcome = Outcome()
    with lowtide.fit(model, optimizer, budget=tight(), spill=tmp_path) as tide:
        states = [torch.get_device_module(name).get_rng_state(name) for name in BOTH]
        before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        hook = model.right.register_forward_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                with tide.step():
                    model(batch(0))
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        hook.remove()
        for name, state in zip(BOTH, states, strict=True):
            torch.get_device_module(name).set_rng_state(state, name)
        with pytest.raises(BadArgument, match="cannot be nested"):
            with tide.step(), tide.step():
                pass
        model.load_state_dict(before)  # the failed passes have changed running statistics
        train(model, optimizer, outcome.record, tide)
    assert_identical(stock(), outcome.record)


@pytest.mark.parametrize("poor", BOTH)
@pytest.mark.parametrize("moment", ["begin_step", "end_step"])
def test_a_step_that_fails_at_its_ends_on_one_device_is_open_on_none(
    poor: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError

    model, _ = build()
    with lowtide.fit(model, budget=tight(), spill=tmp_path) as tide:
        tides: dict[str, Any] = tide._tides  # type: ignore[attr-defined]
        for _ in range(2):
            with monkeypatch.context() as failing:
                failing.setattr(tides[poor]._runtime, moment, fail)
                with pytest.raises(ZeroDivisionError):
                    with tide.step():
                        model(batch(0)).square().mean().backward()
            assert not any(one._inside or one._recorder.recording for one in tides.values())
            assert _get_current_dispatch_mode_stack() == []
        assert tide.stats()["steps"] == 0
        with tide.step():
            model(batch(0)).square().mean().backward()
        assert tide.stats()["steps"] == 1
        assert all(tide.trace(name).ops for name in BOTH)


def test_a_graph_that_outlives_its_tide_has_its_gradients(tmp_path: Path) -> None:
    budget = {device: need.budget_bytes(0.3) for device, need in needs().items()}  # forward takes less than backward
    model, _ = build()
    model(batch(0)).square().mean().backward()
    expected = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    model, _ = build()
    with lowtide.fit(model, budget=budget, spill=tmp_path, policy="lru") as tide:
        with tide.step():
            loss = model(batch(0)).square().mean()
        assert tide.stats()["swapped_out_bytes"] != 0
    loss.backward()
    found = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, found, expected))


class _Crossing(torch.autograd.Function):
    """Saves on one device, and has its result on the other: backward asks for it on the other's thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x.to(SECOND).sin() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        return (gradient * scale * x.to(SECOND).cos()).to(FIRST), None


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=SLOW)])
def test_both_threads_of_backward_may_use_one_device(recompute: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    x = torch.randn(MIB // 16, device=FIRST, requires_grad=True)
    scale = torch.randn(MIB // 16, device=SECOND)

    def gradient() -> Tensor:
        chain, last = x, torch.zeros((), device=SECOND)
        for _ in range(10):  # each has two gradients to add up, in whichever order
            chain = (chain.sin() * 1.01).cos() * 0.99
            last = last + _Crossing.apply(chain, scale).square().sum()
        last = last + checkpoint(lambda h: (h.cos().to(SECOND) * scale).sin(), chain, use_reentrant=False).sum()
        return torch.autograd.grad(last, x)[0].cpu()

    expected = gradient()
    gc.collect()
    held = {name: torch.accelerator.memory_allocated(torch.device(name)) for name in BOTH}
    shake(9, races=True)
    # Of 20 saved tensors on the first device 18 would fit, but 10 gradients may come from the second at any time.
    budget = {FIRST: held[FIRST] + 18 * x.nbytes, SECOND: held[SECOND] + 8 * x.nbytes}
    with lowtide.fit(budget=budget, spill=tmp_path, recompute=recompute) as tide:
        for _ in range(5):
            with tide.step():
                found = gradient()
            assert torch.equal(found, expected)
        stats: dict[str, Any] = tide.stats()
    assert races() == ()
    assert all(stats["devices"][name]["swapped_in_bytes"] > 0 for name in BOTH)


# ---- copies between devices ----


@pytest.mark.parametrize("source", BOTH)
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("first", BOTH)
def test_a_copy_without_room_takes_it_where_it_goes(source: str, asks: bool, first: str) -> None:
    target = BOTH[1 - BOTH.index(source)]
    x = torch.randn(MIB // 4, device=source)
    expected = x.cpu()
    ballasts = {}
    with ExitStack() as stack:
        for name in sorted(BOTH, key=lambda name: name != first):
            ballasts[name] = stack.enter_context(crowded(torch.device(name), blocks=3, asks=asks))
        found = x.to(target)
    assert torch.equal(found.cpu(), expected)
    assert len(ballasts[target].blocks) == (2 if asks else 0), "one block was enough"
    assert (len(ballasts[source].blocks), ballasts[source].asked) == (3, [])


@pytest.mark.parametrize("there", BOTH)
def test_a_stream_of_any_device_leaves_the_current_one_alone(there: str) -> None:
    stream = torch.Stream(device=torch.device(there))
    with on_stream(stream):
        assert torch.accelerator.current_stream(stream.device) == stream
        assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream(stream.device) != stream
    with torch.get_device_module(NAME).stream(stream):
        assert torch.accelerator.current_stream(stream.device) == stream
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("source", BOTH)
def test_a_copy_within_a_step_moves_records_of_its_target_only(source: str, tmp_path: Path) -> None:
    target = BOTH[1 - BOTH.index(source)]
    x = torch.randn(MIB // 4, device=source)
    y = torch.randn(MIB // 4, device=target, requires_grad=True)
    held = {name: torch.accelerator.memory_allocated(torch.device(name)) for name in BOTH}
    budget = {source: held[source] + 64 * MIB, target: held[target] + 8 * MIB}
    with lowtide.fit(budget=budget, spill=tmp_path, policy="lru") as tide:
        with tide.step():
            saved = y
            for _ in range(6):
                saved = saved.sin()
            copies = [x.to(target) for _ in range(3)]
            stats: dict[str, Any] = tide.stats()
            loss = (saved * copies[0]).sum()
            assert all(torch.equal(copy.cpu(), x.cpu()) for copy in copies)
            del saved, copies
            loss.backward()
    assert stats["devices"][target]["swapped_out_bytes"] > 0
    assert stats["devices"][source]["swapped_out_bytes"] == 0


# ---- scripts ----

SCRIPT = """
import torch
from tests.accelerator.split import batch, build
model, optimizer = build()
for index in range(4):
    model(batch(index)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save([parameter.cpu() for parameter in model.parameters()], "{path}")
"""


def test_a_script_is_managed_on_the_devices_that_the_budget_names(tmp_path: Path) -> None:
    spill, script, found, expected = (tmp_path / name for name in ("spill", "train.py", "found", "expected"))
    spill.mkdir()
    script.write_text(SCRIPT.format(path=expected))
    exec(compile(script.read_text(), str(script), "exec"), {})
    script.write_text(SCRIPT.format(path=found))
    gc.collect()
    stats: dict[str, Any] = run_script(script, [], budget={"disk": "64MiB", **tight()}, spill=spill)
    assert stats["steps"] == 4
    for name in BOTH:
        assert stats["devices"][name]["swapped_in_bytes"] > 0
        assert stats["devices"][name]["peak_reserved_bytes"] <= tight()[name]
    assert all(map(torch.equal, torch.load(found), torch.load(expected)))


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    absent = f"{FIRST.partition(':')[0]}:{torch.accelerator.device_count()}"
    with pytest.raises(BadArgument, match=f"names {absent}, but the devices here are {FIRST}, {SECOND}"):
        lowtide.fit(budget={FIRST: "32MiB", absent: "32MiB"}, spill=tmp_path)


class Crosses(torch.autograd.Function):
    """Its backward runs on the second device's thread, and uses what the first has saved."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return (weight * factor).to(SECOND)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradient.to(FIRST) * factor, None


def test_what_was_made_on_the_current_device_is_made_there_again(tmp_path: Path) -> None:
    """`device="cuda"` names no index, and the thread that asks for it has another device current."""
    count = 1 << 16
    weight = torch.ones(count, device=FIRST, requires_grad=True)

    def gradient() -> Tensor:
        total = torch.zeros((), device=SECOND)
        for _ in range(12):
            total = total + Crosses.apply(weight, torch.arange(count, device=NAME, dtype=torch.float32)).sum()
        return torch.autograd.grad(total, weight)[0].cpu()

    expected = gradient()
    gc.collect()
    budget = {FIRST: torch.accelerator.memory_allocated(torch.device(FIRST)) + 8 * weight.nbytes, SECOND: 16 * MIB}
    with lowtide.fit(budget=budget, spill=tmp_path, policy=DiscardAll(once=True)) as tide:
        for _ in range(5):
            with tide.step():
                assert torch.equal(gradient(), expected)
        stats: Any = tide.stats()
    assert stats["devices"][FIRST]["recomputed_ops"] > 0
