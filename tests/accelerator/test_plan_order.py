"""The order of what leaves and comes back is the same in the runtime and in the simulator, for the same plan and step.

Both drive the same residency machine, so what it commands is compared, storage by storage:

- *departures*: writes and discards that the plan wants, of decisions that begin as soon as the storage is free;
- *prefetches* that begin when they are asked for, *demands*: reads that begin when the storage is used, *remakes*.

Each is a sequence of its own. What is not compared, because it is a matter of time and not of the plan: how these
sequences interleave; a prefetch that is put off for lack of room; victims of memory pressure, which the runtime meets
block by block and the simulator operator by operator; what was wanted back before it had left, which the runtime keeps
and the simulator reads; an absence that is over before the program has let go of the storage, where a storage has
several.

The step that is compared waits for the device before every save and use. Else the host, which runs ahead, asks for what
has not left yet as often as not: that is kept, takes the room of others, and they are put off, until there are too few
left to have an order.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import registry
from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Trace
from lowtide.execute.step.runtime import Runtime
from lowtide.execute.step.touching import Touching
from lowtide.residency import events as e
from lowtide.residency import schedule as steps
from lowtide.residency.machine import Residence, Residency
from lowtide.simulate import simulate
from tests import models
from tests.accelerator.devices import CAPACITY_BYTES, NAME
from tests.execute.training import Training


class Trained(Training):
    """The small training, on the device."""

    def __init__(self, make: Callable[[], nn.Module] = models.mlp, **options: Any) -> None:
        super().__init__(lambda: make().to(NAME), **options)

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().batch(index)
        return x.to(NAME), y.to(NAME)

    def backward_only(self) -> None:
        self.loss().backward()  # type: ignore[no-untyped-call]


NETS: dict[str, Callable[[], Training]] = {
    "mlp": Trained,
    "cnn": lambda: Trained(models.cnn, shape=(16, 3, 32, 32)),
}
# What happened to which storage: "out", "discard", "prefetch", "demand" or "remake".
Event = tuple[str, int]
RETURNS = ("prefetch", "demand", "remake")
STAYING = (Residence.RESIDENT, Residence.LEAVING, Residence.CLEAN)

# Those whose departures are not the plan's but memory pressure's: only their returns are compared.
REACTIVE = {
    "lru": "has no plan",
    "unified_memory": "has no plan",
    "dtr": "has no plan, and what it discards depends on measured times; swaps what cannot be made again where nothing "
    "else is left, which the simulator does not: it gets more memory there",
}
# Those that cannot train below the peak.
UNBOUNDED = ("keep_all", "infinite_memory")


@dataclass
class Log:
    """What a residency machine commanded, in order.

    `pressed` left by pressure, `put_off` found no room when they were to come back, `kept` were wanted before they had
    left.
    """

    events: list[Event] = field(default_factory=list)
    pressed: set[int] = field(default_factory=set)
    put_off: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    def command(self, command: e.Command, key: int, before: Residence | None, *, pressure: bool) -> None:
        match command:
            case e.Write() | e.Discard():
                self.events.append(("out" if isinstance(command, e.Write) else "discard", key))
                if pressure:
                    self.pressed.add(key)
            case e.Prefetch():
                self.events.append(("prefetch", key))
            case e.Fetch() if before is Residence.AWAY:
                self.events.append(("demand", key))
            case e.Keep():
                self.kept.add(key)

    def event(self, event: e.Event, key: int, before: Residence | None) -> None:
        match event, before:
            case e.Remade(), _:
                self.events.append(("remake", key))
            case e.NoRoom(), _:
                self._take_back("prefetch", key)
                self.put_off.add(key)
            case e.Held(), Residence.LEAVING:
                self._take_back("out", key)
            case ((e.Held() | e.Unmakeable()), Residence.DISCARDED):
                self._take_back("discard", key)

    def _take_back(self, kind: str, key: int) -> None:
        last = max(at for at, event in enumerate(self.events) if event == (kind, key))
        del self.events[last]

    def departures(self, of: set[int]) -> list[int]:
        """Return which of these storages left because the plan wanted it, each once."""
        left = [key for kind, key in self.events if kind in ("out", "discard")]
        return [key for key in dict.fromkeys(left) if key in of and key not in self.pressed]

    def returns(self, kind: str) -> list[int]:
        """Return what came back in this way, and at once, each storage once.

        Not what was wanted once before it had left: of its several absences, some are over without a return.
        """
        late = self.put_off | self.kept
        return list(dict.fromkeys(key for one, key in self.events if one == kind and key not in late))

    def returned(self) -> set[int]:
        """Return everything that came back."""
        return {key for kind, key in self.events if kind in RETURNS}


@contextmanager
def logged(name_of: Callable[[int], int]) -> Iterator[Log]:
    """Log every machine's commands meanwhile, under the names that their keys have."""
    log = Log()
    originals = {name: getattr(Residency, name) for name in ("on", "follow", "retry_deferred")}

    def wrapped(name: str) -> Callable[..., list[e.Command]]:
        def call(self: Residency, *args: Any, **kwargs: Any) -> list[e.Command]:
            entries = {record: (entry.key, entry.where) for record, entry in self._entries.items()}
            commands: list[e.Command] = originals[name](self, *args, **kwargs)
            event = args[0] if args else None
            if isinstance(event, e.Due):
                log.kept |= {name_of(key) for key, where in entries.values() if key in event.keys and where in STAYING}
            if event is not None and getattr(event, "record", None) in entries:
                key, before = entries[event.record]
                log.event(event, name_of(key), before)
            for command in commands:
                key, before = self._entries[command.record].key, entries.get(command.record, (0, None))[1]
                log.command(command, name_of(key), before, pressure=isinstance(event, e.Pressure))
            return commands

        return call

    try:
        for name in originals:
            setattr(Residency, name, wrapped(name))
        yield log
    finally:
        for name, original in originals.items():
            setattr(Residency, name, original)


@pytest.fixture(autouse=True)
def only_saved_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave parameters and optimizer state on the device: `test_held_plans` is about them."""
    monkeypatch.setattr(Touching, "know_holders", lambda *_: None)


@contextmanager
def in_step_with_the_device() -> Iterator[None]:
    """Let every copy end before the next save or use: what is in memory by then no longer depends on time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("pack", "unpack"):
            original = getattr(Runtime, name)

            def waiting(self: Runtime, value: Any, original: Callable[..., Any] = original) -> Any:
                torch.accelerator.synchronize()
                return original(self, value)

            patch.setattr(Runtime, name, waiting)
        yield


@cache
def budget_of(net: str, share: float) -> int:
    """Return the device's bytes that leave this share of what activations add."""
    training = NETS[net]()
    with (
        TemporaryDirectory() as spill,
        lowtide.fit(training.model, training.optimizer, budget={"device": CAPACITY_BYTES // 2}, spill=spill) as tide,
    ):
        training.steps(3, tide.step)
        trace = tide.trace()
    return trace.static_bytes + int(share * (trace.peak_bytes - trace.static_bytes))


def executed(net: str, policy: str, share: float, spill: Path) -> tuple[Problem, Plan, Log]:
    """Train until the plan is settled, and log one more step."""
    budget_bytes = budget_of(net, share)
    gc.collect()  # the first training of a process leaves cycles of PyTorch's own, and its model takes memory
    training = NETS[net]()
    budget = {"device": budget_bytes}
    with lowtide.fit(training.model, training.optimizer, budget=budget, spill=spill, policy=policy) as tide:
        training.steps(3, tide.step)
        trace, plan = tide.trace(), tide.plan()
        assert plan is not None
        named = logged(lambda key: trace.saves[key].storage if key >= 0 else key)
        with in_step_with_the_device(), named as log:
            training.steps(1, tide.step)
        problem = Problem(trace=trace, machine=tide.machine, budget_bytes=budget_bytes, can_recompute=True)
    return problem, plan, log


def simulated(problem: Problem, plan: Plan, policy: str) -> Log:
    with logged(lambda key: key) as log:
        simulate(problem, plan, policy=registry.policy(policy), strict=True)
    return log


def begin_when_free(trace: Trace, plan: Plan) -> set[int]:
    """Return the storages whose decisions all begin where their gaps do: others leave by an event of the step's."""
    starts = {(gap.storage, gap.after_op) for gap in trace.gaps()}
    gaps = [one.gap for one in (*plan.swaps, *plan.recomputes)]
    late = {gap.storage for gap in gaps if (gap.storage, gap.after_op) not in starts}
    return {gap.storage for gap in gaps} - late


def in_both(these: Sequence[int], those: Sequence[int]) -> tuple[list[int], list[int]]:
    return [one for one in these if one in those], [one for one in those if one in these]


def assert_same_order(net: str, policy: str, share: float, spill: Path) -> None:
    problem, plan, real = executed(net, policy, share, spill)
    if policy == "dtr" and share < 0.8:
        problem = replace(problem, budget_bytes=problem.trace.peak_bytes * 9 // 10)  # see REACTIVE
    model = simulated(problem, plan, policy)
    early = begin_when_free(problem.trace, plan)
    ours, theirs = in_both(real.departures(early), model.departures(early))
    assert ours == theirs, "they leave in another order"
    # What one operator waits for is made in one go: by that operator, not by its place in the group.
    made_for = {one.gap.storage: one.gap.before_op for one in reversed(plan.recomputes)}
    for kind in RETURNS:
        ours, theirs = in_both(real.returns(kind), model.returns(kind))
        if kind == "remake":
            ours, theirs = ([made_for.get(key, key) for key in keys] for keys in (ours, theirs))
        assert ours == theirs, f"they come back in another order by {kind}"
    back = model.returned() & real.returned()
    if policy in REACTIVE:
        assert back or policy == "dtr"
        return
    # All that the plan moves leaves, in both; and comes back, unless it never left.
    gone = set(real.departures(early)) | real.pressed | real.kept
    assert set(model.departures(early)) <= gone, "the runtime does not follow the plan"
    assert model.returned() - real.kept - model.pressed <= real.returned()


@pytest.mark.parametrize(
    ("net", "policy", "share"),
    [("mlp", "auto", 0.6), ("mlp", "superneurons", 0.6), ("mlp", "lru", 0.6), ("cnn", "vdnn_pp", 0.8)],
)
def test_storages_leave_and_come_back_in_the_same_order(net: str, policy: str, share: float, tmp_path: Path) -> None:
    assert_same_order(net, policy, share, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.7, 0.85])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("policy", [name for name in registry.policy_names() if name not in UNBOUNDED])
def test_under_every_policy_the_order_is_the_same(policy: str, net: str, share: float, tmp_path: Path) -> None:
    assert_same_order(net, policy, share, tmp_path)


def test_a_chain_under_a_plan_for_everything_moves_exactly_as_simulated(tmp_path: Path) -> None:
    problem, plan, real = executed("mlp", "swap_all", 0.6, tmp_path)
    model = simulated(problem, plan, "swap_all")
    early = begin_when_free(problem.trace, plan)
    assert len(early) == len(plan.swaps) > 8
    # Where the disk is slow for a moment, pressure takes what the plan would, and what is wanted again stays.
    otherwise = real.pressed | real.kept
    followed = [key for key in model.departures(early) if key not in otherwise]
    assert [key for key in real.departures(early) if key not in otherwise] == followed
    assert len(followed) > 8
    assert real.returned() | real.kept == model.returned()


def test_another_order_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is asked for at one event, the other way round: storages are numbered in the order they are made in.
    monkeypatch.setattr(steps, "_by_request", lambda swap: (swap.fetch_op, swap.gap))
    with pytest.raises(AssertionError, match="they come back in another order by prefetch"):
        assert_same_order("mlp", "flashneuron", 0.6, tmp_path)
