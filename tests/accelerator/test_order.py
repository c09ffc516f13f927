"""Every rule of order is needed: without it, data are wrong or the race detector says so; with all of them, neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.execute.backends.accelerator import order as order
from lowtide.execute.backends.accelerator.backend import AcceleratorBackend
from lowtide.execute.observe import touches
from lowtide.execute.step.touching import Touching
from lowtide.tiers.file import FileMedium
from tests.accelerator import harness
from tests.accelerator.devices import IS_EMULATED, device, races, shake

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="a real device cannot be told to be late")

MIB = 1 << 20
# Two megabytes take a tenth of a second: whoever does not wait is early for certain.
SLOW = {"d2h_bytes_per_s": 20e6, "h2d_bytes_per_s": 20e6}
COUNT = MIB // 2


class Stage:
    """A backend on a slow device, on which a scene is played."""

    def __init__(self, spill: Path, *, host_bytes: int = 64 * MIB) -> None:
        self.device = device()
        shake(7, races=True, **SLOW)
        self.backend = AcceleratorBackend(FileMedium([spill]), device=self.device, host_bytes=host_bytes)
        self.backend.open(budget_bytes=256 * MIB, on_pressure=self._on_pressure)
        self.victims: list[int] = []

    def _on_pressure(self, need_bytes: int) -> int:
        self.backend.events()
        for record in self.victims:
            self.backend.write(record, 4 * COUNT)
        return 0

    def save(self, value: float) -> tuple[int, int]:
        """Save a tensor that a queue of kernels has yet to fill, and let go of it."""
        tensor = torch.zeros(COUNT, device=self.device)
        for _ in range(4):
            tensor += value / 4
        packed = self.backend.pack(tensor)
        del tensor
        self.backend.events()
        return packed.pack, packed.record

    def write(self, record: int) -> None:
        assert self.backend.write(record, 4 * COUNT)

    def land(self, record: int) -> None:
        """Give up a record's block while its copy is under way."""
        with self.backend._lock:
            self.backend._land(1)
        assert self.backend._records[record].storage is None

    def busy(self) -> None:
        """Queue kernels that take and change all the memory that is free for them."""
        for _ in range(3):
            torch.full((COUNT,), -1.0, device=self.device).mul_(2.0)

    def late(self) -> None:
        """Queue kernels that take a while."""
        slow = torch.zeros(COUNT, device=self.device)
        for _ in range(30):
            slow += 0.0

    def fetch(self, pack: int, record: int) -> Tensor:
        tensor = None
        while tensor is None:
            self.backend.fetch(record)
            self.backend.wait(record)
            tensor = self.backend.tensor(pack, torch.float32)
        return tensor

    def close(self) -> None:
        self.backend.close(bring_back=False)
        torch.accelerator.synchronize()


def copied_out_while_computing(stage: Stage) -> bool:
    """A copy out right after the kernels that fill the tensor; its block goes to the next kernels; it comes back."""
    pack, record = stage.save(3.0)
    stage.write(record)
    stage.land(record)
    stage.busy()
    return bool((stage.fetch(pack, record) == 3.0).all())


def back_into_a_busy_block(stage: Stage) -> bool:
    """A copy back into a block that queued kernels still write to, used at once."""
    pack, record = stage.save(5.0)
    stage.write(record)
    torch.accelerator.synchronize()
    stage.backend.events()
    stage.busy()
    late = torch.zeros(COUNT, device=stage.device)
    for _ in range(8):
        late += 1.0
    del late
    return bool((stage.fetch(pack, record) * 1.0 == 5.0).all())


def back_before_it_is_out(stage: Stage) -> bool:
    """A record that is needed while its copy out is under way, by a stream that nothing has ordered after that."""
    pack, record = stage.save(2.0)
    stage.write(record)
    stage.land(record)
    with order.on_stream(torch.Stream(device=stage.device)):
        return bool((stage.fetch(pack, record) == 2.0).all())


def released_before_it_arrived(stage: Stage) -> bool:
    """A prefetched record whose block is taken back while the copy into it is under way."""
    pack, record = stage.save(4.0)
    stage.write(record)
    torch.accelerator.synchronize()
    stage.backend.events()
    assert stage.backend.prefetch(record)
    assert stage.backend.release(record)
    other = torch.full((COUNT,), 6.0, device=stage.device)
    intact = bool((other == 6.0).all())
    return intact and bool((stage.fetch(pack, record) == 4.0).all())


def used_on_another_stream(stage: Stage) -> bool:
    """A record fetched for one stream and read on another, which is late; then its block goes to the first."""
    pack, record = stage.save(7.0)
    stage.write(record)
    torch.accelerator.synchronize()
    stage.backend.events()
    assert stage.backend.prefetch(record)
    torch.accelerator.synchronize()
    side = torch.Stream(device=stage.device)
    with order.on_stream(side):
        slow = torch.zeros(COUNT, device=stage.device)
        for _ in range(30):
            slow += 0.0
        read = stage.backend.tensor(pack, torch.float32)
        assert read is not None
        doubled = read * 2.0 + slow
    stage.backend.close_pack(pack)
    del read
    stage.busy()
    torch.accelerator.synchronize()
    return bool((doubled == 14.0).all())


def made_on_another_stream(stage: Stage) -> bool:
    """A record that the program made on a stream of its own, which goes on as soon as the block is given up.

    Without Lowtide the tensor would live on, so the program has no reason to call record_stream.
    """
    side = torch.Stream(device=stage.device)
    with order.on_stream(side):
        tensor = torch.full((COUNT,), 9.0, device=stage.device)
    main = torch.accelerator.current_stream()
    main.wait_stream(side)
    packed = stage.backend.pack(tensor)
    del tensor
    stage.backend.events()
    stage.write(packed.record)
    stage.land(packed.record)
    with order.on_stream(side):
        stage.busy()
    return bool((stage.fetch(packed.pack, packed.record) == 9.0).all())


def slot_is_filled_while_it_is_read(stage: Stage) -> bool:
    """There is one slot: a record is copied back from it while another is brought from the disk, into the same."""
    first_pack, first = stage.save(1.0)
    stage.write(first)
    stage.land(first)
    second_pack, second = stage.save(2.0)
    while not stage.backend.write(second, 4 * COUNT):
        stage.backend._host.wait_for_any()
        stage.backend.events()
    stage.land(second)
    torch.accelerator.synchronize()
    stage.backend.events()
    read = stage.fetch(second_pack, second)
    stage.backend.stage(first)
    stage.backend.wait(first)
    return bool((read == 2.0).all()) and bool((stage.fetch(first_pack, first) == 1.0).all())


def slots_in_a_row(stage: Stage) -> bool:
    """More records than pinned memory has room for: slots are used again, and copies go on to the disk."""
    saved = [stage.save(float(value)) for value in range(1, 7)]
    stage.victims = [record for _, record in saved]
    for _, record in saved:
        while stage.backend._records[record].storage is not None:
            stage.backend._on_pressure(1)
            with stage.backend._lock:
                stage.backend._land(1 << 40)
            stage.backend._host.wait_for_any()
        stage.busy()
    return all(
        bool((stage.fetch(pack, record) == float(value)).all())
        for value, (pack, record) in reversed(list(enumerate(saved, start=1)))
    )


def run_again_while_another_stream_computes(stage: Stage) -> bool:
    """An operator runs again that reads what another stream is still making."""
    with order.on_stream(torch.Stream(device=stage.device)):
        _, record = stage.save(3.0)
    row = stage.backend.flat(record, torch.float32)
    made = stage.backend.run(torch.ops.aten.mul.Scalar, (row, 2.0), {})
    return bool((made == 6.0).all())


def run_again_with_an_operand_of_another_stream(stage: Stage) -> bool:
    """An operator runs again, late, that reads what belongs to another stream, which then goes on."""
    side = torch.Stream(device=stage.device)
    with order.on_stream(side):
        tensor = torch.full((COUNT,), 4.0, device=stage.device)
    torch.accelerator.current_stream().wait_stream(side)
    alias = stage.backend.alias(tensor)
    del tensor
    stage.late()
    made = stage.backend.run(torch.ops.aten.mul.Scalar, (alias, 2.0), {})
    del alias
    with order.on_stream(side):
        stage.busy()
    return bool((made == 8.0).all())


def made_again_for_another_stream(stage: Stage) -> bool:
    """A record that one stream is still making again is read by another, late; then its block goes to the first."""
    pack, record = stage.save(7.0)
    assert stage.backend.discard(record)
    stage.late()
    assert stage.backend.adopt(record, torch.full((COUNT,), 7.0, device=stage.device))
    with order.on_stream(torch.Stream(device=stage.device)):
        stage.late()
        read = stage.backend.tensor(pack, torch.float32)
        assert read is not None
        doubled = read * 2.0
    stage.backend.close_pack(pack)
    del read
    stage.busy()
    torch.accelerator.synchronize()
    return bool((doubled == 14.0).all())


def discarded_before_it_arrived(stage: Stage) -> bool:
    """A prefetched record that is given up for good while the copy into its block is under way."""
    _, record = stage.save(4.0)
    stage.write(record)
    torch.accelerator.synchronize()
    stage.backend.events()
    assert stage.backend.prefetch(record)
    assert stage.backend.discard(record)
    other = torch.full((COUNT,), 6.0, device=stage.device)
    return bool((other == 6.0).all())


def discarded_while_it_is_read(stage: Stage) -> bool:
    """A record that belongs to another stream is given up while kernels still read it; that stream goes on."""
    side = torch.Stream(device=stage.device)
    with order.on_stream(side):
        tensor = torch.full((COUNT,), 9.0, device=stage.device)
    torch.accelerator.current_stream().wait_stream(side)
    packed = stage.backend.pack(tensor)
    stage.late()
    doubled = tensor * 2.0
    del tensor
    stage.backend.events()
    assert stage.backend.discard(packed.record)
    with order.on_stream(side):
        stage.busy()
    return bool((doubled == 18.0).all())


class Holder:
    """Lends what is held to whoever touches it, and brings nothing back."""

    def __init__(self, backend: AcceleratorBackend) -> None:
        self.device = backend.device
        self._backend = backend

    def touched(self, operator: str, told: Sequence[touches.Touch]) -> list[tuple[int, bool]]:
        found = [(record, one.writes) for one in told if (record := self._backend.shell_of(one.storage)) is not None]
        for record, _ in found:
            assert self._backend.lend(record), f"{operator} needs what is away"
        return found

    def left(self, token: Any) -> None:
        for record, writes in token:
            self._backend.take_back(record, wrote=writes)

    def address_asked(self, storage: int) -> None:
        raise AssertionError("nobody asks for an address here")


@contextmanager
def held(stage: Stage, value: float) -> Iterator[tuple[Tensor, int]]:
    """Yield a tensor that the program holds, which a queue of kernels has yet to fill, and its record."""
    holder = Holder(stage.backend)
    touches.watch(holder)
    try:
        tensor = torch.zeros(COUNT, device=stage.device)
        for _ in range(4):
            tensor += value / 4
        adopted = stage.backend.adopt_shell(tensor, kind="a parameter", least_bytes=MIB)
        assert adopted is not None
        yield tensor, adopted[0]
    finally:
        touches.unwatch(stage.device)


def changed_while_it_is_copied_out(stage: Stage) -> bool:
    """What the program holds leaves, and is changed before its copy out is done."""
    with held(stage, 3.0) as (tensor, record):
        stage.write(record)
        tensor.mul_(2.0)
        return bool((tensor == 6.0).all())


def held_and_given_up_while_it_is_copied_out(stage: Stage) -> bool:
    """The block of what is held goes to the next kernels while it is copied out; it comes back, and is read."""
    with held(stage, 5.0) as (tensor, record):
        stage.write(record)
        stage.land(record)
        others = [torch.full((COUNT,), -1.0, device=stage.device) for _ in range(8)]  # one of them is given the block
        stage.backend.fetch(record)
        others.clear()
        stage.busy()
        return bool((tensor == 5.0).all())


def held_and_read_on_two_streams(stage: Stage) -> bool:
    """What the program holds is on its way back when two streams read it that know nothing of each other."""
    side = torch.Stream(device=stage.device)
    with held(stage, 7.0) as (tensor, record):
        stage.write(record)
        torch.accelerator.synchronize()
        stage.backend.events()
        stage.backend.fetch(record)
        here = tensor * 2.0
        with order.on_stream(side):
            there = tensor * 3.0
        torch.accelerator.synchronize()
        return bool((here == 14.0).all()) and bool((there == 21.0).all())


Scene = Callable[[Stage], bool]
# For each rule, the scenes that need it.
SCENES: dict[str, tuple[Scene, ...]] = {
    "copy_out_after_compute": (copied_out_while_computing, held_and_given_up_while_it_is_copied_out),
    "free_after_copy": (copied_out_while_computing, released_before_it_arrived, discarded_before_it_arrived),
    "copy_back_after_compute": (back_into_a_busy_block,),
    "copy_back_after_copy_out": (back_before_it_is_out,),
    "use_after_copy_back": (back_into_a_busy_block, back_before_it_is_out, held_and_read_on_two_streams),
    "write_after_copy_out": (changed_while_it_is_copied_out,),
    "rerun_after_compute": (run_again_while_another_stream_computes,),
    "share_with_stream": (
        used_on_another_stream,
        run_again_with_an_operand_of_another_stream,
        made_again_for_another_stream,
    ),
    "free_in_order_of_stream": (made_on_another_stream, discarded_while_it_is_read),
    "host_memory_is_idle": (slot_is_filled_while_it_is_read,),
    "is_filled": (slots_in_a_row,),
}
HOST_BYTES = {slots_in_a_row: 4 * MIB, slot_is_filled_while_it_is_read: 2 * MIB}


def test_every_rule_has_a_scene_that_needs_it() -> None:
    assert set(SCENES) == set(order.RULES)


@contextmanager
def without(rule: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if rule is not None:
            answers = rule in ("host_memory_is_idle", "is_filled")
            patch.setattr(order, rule, lambda *_: True if answers else None)
        yield


def play(scene: Scene, spill: Path) -> tuple[bool, tuple[str, ...]]:
    stage = Stage(spill, host_bytes=HOST_BYTES.get(scene, 64 * MIB))
    try:
        exact = scene(stage)
    finally:
        stage.close()
        found = races()
        shake(None)
    return exact, found


@pytest.mark.parametrize("scene", sorted({scene for scenes in SCENES.values() for scene in scenes}, key=str))
def test_with_all_rules_the_data_are_right_and_no_race_is_found(scene: Scene, tmp_path: Path) -> None:
    exact, found = play(scene, tmp_path)
    assert exact
    assert not found


@pytest.mark.parametrize(("rule", "scene"), [(rule, scene) for rule, scenes in SCENES.items() for scene in scenes])
def test_without_a_rule_the_loss_is_noticed(rule: str, scene: Scene, tmp_path: Path) -> None:
    with without(rule):
        exact, found = play(scene, tmp_path)
    assert not exact or found


# In this training the two streams know of each other, so another rule covers what these would.
SELDOM_NEEDED = (
    "copy_back_after_copy_out",
    "free_in_order_of_stream",
    "rerun_after_compute",
    "write_after_copy_out",
)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in order.RULES if rule not in SELDOM_NEEDED])
def test_a_training_without_a_rule_is_noticed(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a whole training: whether a block is used too early is a matter of time, so several are tried."""
    expected = harness.stock("two_streams")
    slow = {"d2h_bytes_per_s": 2e8, "h2d_bytes_per_s": 2e8}
    # Else parameters leave as well, and their waits order more than these rules do.
    monkeypatch.setattr(Touching, "know_holders", lambda *_: None)
    monkeypatch.setattr(harness, "shake", lambda seed, **knobs: shake(seed, **knobs, **(slow if seed else {})))
    harness.need("two_streams")

    def is_noticed(seed: int) -> bool:
        outcome = harness.pressed("two_streams", share=0.4, spill=tmp_path, host_bytes=MIB, seed=seed, watch_races=True)
        return bool(outcome.races) or outcome.record.entries != expected.entries

    assert not is_noticed(3), "with all rules nothing is to be noticed"
    with without(rule):
        assert any(is_noticed(seed) for seed in range(3, 11))
