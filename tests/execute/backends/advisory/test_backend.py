"""Without the native part: the budget is accounted for in Python, and everything else holds as before."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.core.machine import Link, Machine
from lowtide.core.plan import Problem
from lowtide.core.trace import Gap, Phase
from lowtide.errors import BadArgument, BudgetTooSmall, NativeUnavailable, SpillCorrupted, SpillError, SpillFull
from lowtide.execute.backends.advisory import backend as advisory
from lowtide.execute.backends.advisory import records as advisory_records
from lowtide.execute.backends.advisory.backend import AdvisoryBackend
from lowtide.plan import verify
from lowtide.plan.policies.auto import Auto
from lowtide.residency.events import Arrived, Gone, Held, Sole, Written
from lowtide.tiers.file import FileMedium
from lowtide.tiers.wrappers import Direction, Fault, FaultKind, Faulty, Throttle
from tests import models
from tests.execute.training import Training

REASON = "no C++ compiler found"
MIB = 2**20


@pytest.fixture(autouse=True)
def without_the_native_part(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def unavailable() -> None:
        raise NativeUnavailable(REASON)

    monkeypatch.setattr("lowtide.memory.ranges.load", unavailable)
    said = threading.Event()
    said.set()
    monkeypatch.setattr(advisory, "_warned", said)  # one test is about the warning; the others need none
    gc.collect()
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("lowtide")]
    assert not left, f"threads that still run: {left}"


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[AdvisoryBackend]:
    made = AdvisoryBackend(FileMedium([tmp_path]), verify=True, reason=REASON)
    yield made
    made.close()


def cnn() -> Training:
    return Training(models.cnn, shape=(16, 3, 32, 32))


def transformer() -> Training:
    return Training(models.Transformer, shape=(8, 64), vocabulary=256)


TRAININGS = pytest.mark.parametrize("make", [cnn, transformer])


def half_of_activations(make: Callable[[], Training], spill: Path) -> int:
    training = make()
    with lowtide.fit(training.model, training.optimizer, budget="1GiB", spill=spill) as tide:
        training.steps(3, tide.step)
        stats: dict[str, Any] = tide.stats()
    gc.collect()
    return int(stats["static_bytes"] + 0.5 * (stats["peak_bytes"] - stats["static_bytes"]))


def over_budget_bytes(tide: lowtide.Tide) -> int:
    assert isinstance(tide._backend, AdvisoryBackend)
    return tide._backend.over_budget_bytes


def is_sole(backend: AdvisoryBackend, record: int) -> bool:
    return Sole(record) in backend.events()


# ---- training ----


@pytest.mark.parametrize("policy", ["auto", "lru", "swap_all"])
@TRAININGS
def test_training_at_half_of_its_activations_is_bitwise_equal_to_stock(
    make: Callable[[], Training], policy: str, tmp_path: Path
) -> None:
    budget_bytes = half_of_activations(make, tmp_path)
    expected = make().steps(5).result()
    training = make()
    with lowtide.fit(training.model, training.optimizer, budget=budget_bytes, spill=tmp_path, policy=policy) as tide:
        assert isinstance(tide._backend, AdvisoryBackend)
        training.steps(5, tide.step)
        stats: dict[str, Any] = tide.stats()
        assert over_budget_bytes(tide) == 0
        largest_bytes = max(storage.nbytes for storage in tide.trace().storages)
    assert training.result() == expected
    assert stats["budget_exact"] is False
    assert stats["swapped_out_bytes"] > 0
    assert stats["swapped_in_bytes"] > 0
    # A storage exists already when it is accounted for; then what is too much leaves.
    assert stats["peak_bytes"] <= budget_bytes + largest_bytes
    assert list(tmp_path.iterdir()) == []


def test_without_pressure_nothing_moves(tmp_path: Path) -> None:
    training = cnn()
    with lowtide.fit(training.model, training.optimizer, budget="1GiB", spill=tmp_path) as tide:
        training.steps(4, tide.step)
        stats: dict[str, Any] = tide.stats()
    assert stats["swapped_out_bytes"] == stats["swapped_in_bytes"] == 0
    assert stats["stall_s"] == 0
    assert stats["over_budget_bytes"] == 0
    assert training.result() == cnn().steps(4).result()


def test_a_policy_that_moves_nothing_passes_the_budget_and_is_counted(tmp_path: Path) -> None:
    budget_bytes = half_of_activations(cnn, tmp_path)
    training = cnn()
    with lowtide.fit(
        training.model, training.optimizer, budget=budget_bytes, spill=tmp_path, policy="keep_all"
    ) as tide:
        training.steps(2, tide.step)
        stats: dict[str, Any] = tide.stats()
        assert over_budget_bytes(tide) > 0
        assert stats["over_budget_bytes"] == over_budget_bytes(tide)
        assert stats["peak_bytes"] == budget_bytes + stats["over_budget_bytes"]
        assert "advisory peak" in repr(tide)
    assert training.result() == cnn().steps(2).result()


def test_garbage_collection_at_every_allocation_does_no_harm(tmp_path: Path) -> None:
    budget_bytes = half_of_activations(cnn, tmp_path)
    training = cnn()
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1_000_000)
    try:
        with lowtide.fit(
            training.model, training.optimizer, budget=budget_bytes, spill=tmp_path, policy="swap_all"
        ) as tide:
            training.steps(3, tide.step)
    finally:
        gc.set_threshold(*before)
    assert training.result() == cnn().steps(3).result()


def test_a_slow_disk_is_waited_for_and_the_trace_leaves_the_waiting_out(tmp_path: Path) -> None:
    budget_bytes = half_of_activations(cnn, tmp_path)
    training = cnn()
    slow = Throttle(FileMedium([tmp_path]), write_bytes_per_s=20e6, read_bytes_per_s=20e6)
    with lowtide.fit(training.model, training.optimizer, budget=budget_bytes, spill=slow, policy="lru") as tide:
        training.steps(2, tide.step)
        stats: dict[str, Any] = tide.stats()
        assert over_budget_bytes(tide) == 0
        computing_s = tide.trace().duration_s
    assert training.result() == cnn().steps(2).result()
    assert stats["last_step_stall_s"] > 0.1
    assert computing_s < stats["last_step_s"] - 0.8 * stats["last_step_stall_s"]


# ---- the trace ----


def chain(x: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = torch.sigmoid(x)
    return x


def test_the_trace_of_a_chain_is_what_its_code_says(tmp_path: Path) -> None:
    length = 6
    x = torch.randn(MIB // 4, requires_grad=True)
    with lowtide.fit(budget="1GiB", spill=tmp_path) as tide:
        with tide.step():
            chain(x, length).sum().backward()
        trace = tide.trace()
        stats: dict[str, Any] = tide.stats()
    # Operator i + 1 begins at event i: the outputs 0 to 5 are saved in order, and asked for in the opposite one.
    assert len(trace.ops) == 2 * length + 1
    assert [save.packed_op for save in trace.saves] == list(range(length))
    assert [save.uses for save in trace.saves] == [(2 * length - k,) for k in range(length)]
    # While output k + 1 is being saved the loop still holds output k; at the next event it does not.
    assert [save.free_op for save in trace.saves[:-2]] == [k + 3 for k in range(length - 2)]
    assert trace.gaps()[0] == Gap(storage=trace.saves[0].storage, after_op=3, before_op=2 * length)
    assert {op.phase for op in trace.ops[: length + 1]} == {Phase.FORWARD}
    assert {op.phase for op in trace.ops[length + 1 :]} == {Phase.BACKWARD}
    assert trace.peak_bytes - trace.static_bytes == length * MIB
    assert trace.peak_bytes == stats["peak_bytes"]
    assert trace.ops[0].peak_bytes == trace.static_bytes + MIB
    assert trace.ops[-1].peak_bytes == trace.static_bytes + MIB
    assert all(op.duration_s > 0 for op in trace.ops)


def recorded_chain(x: Tensor, *, budget_bytes: int, spill: Path) -> tuple[int, list[int], object]:
    """Record a step with a graph that is let go of and one that is run; return bytes moved, the curve and the saves."""
    with lowtide.fit(budget=budget_bytes, spill=spill, policy="lru") as tide:
        with tide.step():
            chain(x, 8)
            chain(x, 9).sum().backward()
        trace, stats = tide.trace(), tide.stats()
    return int(str(stats["swapped_out_bytes"])), [op.peak_bytes for op in trace.ops], trace.saves


def test_a_trace_recorded_while_records_leave_is_that_of_the_unmanaged_step(tmp_path: Path) -> None:
    x = torch.randn(MIB // 4, requires_grad=True)
    x.grad = torch.zeros_like(x)
    budget_bytes = tight(tmp_path)
    moved, managed_curve, managed_saves = recorded_chain(x, budget_bytes=budget_bytes, spill=tmp_path)
    none, curve, saves = recorded_chain(x, budget_bytes=budget_bytes + 100 * MIB, spill=tmp_path)
    assert moved > none == 0
    assert managed_curve == curve
    assert managed_saves == saves


@TRAININGS
def test_the_default_policy_plans_from_the_trace_and_the_verifier_agrees(
    make: Callable[[], Training], tmp_path: Path
) -> None:
    budget_bytes = half_of_activations(make, tmp_path)
    training = make()
    with lowtide.fit(training.model, training.optimizer, budget=budget_bytes, spill=tmp_path) as tide:
        training.steps(3, tide.step)
        trace, made = tide.trace(), tide.plan()
    assert made is not None
    assert made.swaps
    machine = Machine(name="test", links={"spill": Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9)})
    problem = Problem(trace=trace, machine=machine, budget_bytes=budget_bytes)
    verify.check(Auto().plan(problem), problem)
    assert trace.floor_bytes() <= budget_bytes < trace.peak_bytes


# ---- the warning ----


def test_it_says_once_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(advisory, "_warned", threading.Event())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            lowtide.fit(budget="1GiB", spill=tmp_path).close()
    assert len(caught) == 1
    assert caught[0].category is RuntimeWarning
    assert caught[0].filename == __file__
    for part in (REASON, "only advisory", "PyTorch's own allocator", "`lowtide doctor`"):
        assert part in str(caught[0].message)
    # The reason brings its own way out, which need not be a compiler.
    assert "install" not in str(caught[0].message)


def test_a_machine_without_a_compiler_trains_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    (tmp_path / "cache").mkdir()
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch, lowtide

def run(step):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(8)))
    for _ in range(3):
        with step():
            model(torch.randn(512, 128)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]

import contextlib
expected = run(contextlib.nullcontext)
with lowtide.fit(budget="4MiB", spill="spill") as tide:
    assert all(map(torch.equal, run(tide.step), expected)), "gradients differ"
    stats = tide.stats()
print(stats["budget_exact"], stats["swapped_out_bytes"] > 0)
"""
    )
    environment = os.environ | {
        "CXX": str(tmp_path / "no-such-compiler"),
        "LOWTIDE_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(lowtide.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["False", "True"]
    assert run.stderr.count("only advisory") == 1
    assert "no C++ compiler found" in run.stderr
    assert list((tmp_path / "spill").iterdir()) == []


def test_a_torch_that_cannot_tell_who_holds_a_storage_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(advisory, "can_count_holders", False)
    with pytest.raises(NativeUnavailable, match=f"{re.escape(REASON)}.*torch 2.8"):
        lowtide.fit(budget="1GiB", spill=tmp_path)


# ---- stock semantics ----


def change_in_forward(x: Tensor) -> None:
    h = torch.sigmoid(x)
    out = (h * 2).sum()
    h.add_(1)
    out.backward()


class ChangesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.saved_tensors[0].mul_(3)
        return grad


def change_in_backward(x: Tensor) -> None:
    ChangesWhatItSaved.apply(torch.sigmoid(x)).sum().backward()  # type: ignore[no-untyped-call]


def backward_twice(x: Tensor) -> None:
    out = torch.sigmoid(x).sum()
    out.backward()
    out.backward()


@pytest.mark.parametrize("fail", [change_in_forward, change_in_backward, backward_twice])
def test_what_fails_in_stock_fails_with_the_same_words(fail: Callable[[Tensor], None], tmp_path: Path) -> None:
    x = torch.randn(MIB // 4, requires_grad=True)
    with pytest.raises(RuntimeError) as stock:
        fail(x)
    with lowtide.fit(budget="1GiB", spill=tmp_path, policy="swap_all") as tide:
        with tide.step():
            chain(x, 4).sum().backward()
        with pytest.raises(RuntimeError) as managed, tide.step():
            fail(x)
    # Stock also names the node that made the tensor, which a hook does not know.
    stock_words = re.sub(r", which is output \d+ of \w+,", "", str(stock.value))
    assert str(managed.value).split("Hint")[0] == stock_words.split("Hint")[0]


def test_retain_graph_and_double_backward_are_exact(tmp_path: Path) -> None:
    def gradients(step: Callable[[], Any]) -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.randn(MIB // 4, requires_grad=True)
        found = []
        for _ in range(3):
            with step():
                out = chain(x, 6).square().sum()
                found += torch.autograd.grad(out, x, retain_graph=True)
                (first,) = torch.autograd.grad(out, x, create_graph=True)
                found += torch.autograd.grad(first.square().sum(), x)
        return found

    expected = gradients(nullcontext)
    with lowtide.fit(budget="1GiB", spill=tmp_path) as tide:
        base_bytes = int(str(tide.stats()["static_bytes"]))
    with lowtide.fit(budget=base_bytes + 8 * MIB, spill=tmp_path) as tide:
        found = gradients(tide.step)
        assert int(str(tide.stats()["swapped_in_bytes"])) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---- who holds a storage ----

HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[3:5],
    "a detached tensor": lambda tensor: tensor.detach(),
    "a graph": lambda tensor: tensor.clone().requires_grad_() * tensor,
    "an array": lambda tensor: tensor.numpy(),
    "the storage": lambda tensor: tensor.untyped_storage(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_record_is_sole_only_once_nobody_else_holds_it(backend: AdvisoryBackend, holder: str) -> None:
    tensor = torch.randn(1000)
    held = [HOLDERS[holder](tensor)]
    packed = backend.pack(tensor)
    del tensor
    assert not is_sole(backend, packed.record)
    assert not backend.write(packed.record, packed.nbytes)
    held.clear()
    assert is_sole(backend, packed.record)
    assert not is_sole(backend, packed.record), "it is said once"
    backend.watch(packed.record)
    assert is_sole(backend, packed.record)


def test_a_view_is_a_record_with_its_base(backend: AdvisoryBackend) -> None:
    tensor = torch.randn(100, 10)
    first, second = backend.pack(tensor[10:20].t()), backend.pack(tensor)
    assert (first.record, first.is_new, first.nbytes) == (second.record, True, 4000)
    assert not second.is_new
    got = backend.tensor(first.pack, torch.float32)
    assert got is not None
    assert torch.equal(got, tensor[10:20].t())
    assert got.stride() == tensor[10:20].t().stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_versions_are_seen_without_holding_the_bytes(
    backend: AdvisoryBackend, dtype: torch.dtype, requires_grad: bool
) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    if requires_grad and dtype is not torch.bool:
        tensor = tensor.requires_grad_() * 1
    packed = backend.pack(tensor)
    assert backend.version(packed.pack) == packed.version == tensor._version
    with torch.no_grad():
        tensor.zero_()
        tensor[:7].fill_(1)
    assert backend.version(packed.pack) == tensor._version == packed.version + 2
    del tensor
    assert is_sole(backend, packed.record)
    assert backend.version(packed.pack) == packed.version + 2


# ---- the life of a record ----


def leave(backend: AdvisoryBackend, tensor: Tensor) -> tuple[int, int]:
    """Write out a tensor that the caller has let go of; return its pack and record."""
    packed = backend.pack(tensor)
    del tensor
    return packed.pack, packed.record


def test_a_record_leaves_and_comes_back_with_its_bytes(backend: AdvisoryBackend) -> None:
    backend.open(budget_bytes=2**40, on_pressure=lambda need: 0)
    expected = torch.randn(1000)
    before_bytes = backend.usage().live_bytes
    pack, record = leave(backend, expected.clone())
    assert is_sole(backend, record)
    assert backend.write(record, 4000)
    assert backend.usage().live_bytes == before_bytes + 4000, "fast memory pays until the write has landed"
    backend.wait(record)
    assert backend.events() == [Written(record, resident=False)]
    assert backend.usage().live_bytes == before_bytes
    assert backend.tensor(pack, torch.float32) is None
    assert not backend.keep(record)
    assert backend.prefetch(record)
    assert backend.usage().live_bytes == before_bytes + 4000, "fast memory pays from when the read began"
    backend.wait(record)
    assert Arrived(record) in backend.events()
    got = backend.tensor(pack, torch.float32)
    assert got is not None
    assert torch.equal(got, expected)
    assert not backend.release(record), "it is in use"
    del got
    assert not backend.release(record), "it was handed out: what the tier holds counts for nothing"
    assert backend.write(record, 4000)
    backend.wait(record)
    assert backend.events() == [Written(record, resident=False)]
    assert backend.usage().live_bytes == before_bytes
    backend.close_pack(pack)
    assert backend.events() == [Gone(record)]
    assert backend._store.used_bytes == 0
    assert (backend.usage().written_bytes, backend.usage().read_bytes) == (8000, 4000)


def test_a_leaving_record_that_is_wanted_stays(backend: AdvisoryBackend) -> None:
    pack, record = leave(backend, torch.ones(1000))
    backend.events()
    assert backend.write(record, 4000)
    assert backend.keep(record)
    backend.wait(record)
    assert Written(record, resident=True) in backend.events()
    assert backend.tensor(pack, torch.float32) is not None


def test_a_prefetch_finds_no_room_where_a_fetch_presses_and_goes_on(backend: AdvisoryBackend) -> None:
    pressed: list[int] = []

    def on_pressure(need_bytes: int) -> int:
        pressed.append(need_bytes)
        return 0

    pack, record = leave(backend, torch.ones(1000))
    backend.events()
    assert backend.write(record, 4000)
    backend.wait(record)
    backend.refresh_static()
    backend.open(budget_bytes=backend.usage().live_bytes + 3000, on_pressure=on_pressure)
    assert not backend.prefetch(record)
    assert pressed == []
    backend.fetch(record)
    assert pressed == [1000]
    assert backend.over_budget_bytes == 1000
    backend.wait(record)
    assert backend.tensor(pack, torch.float32) is not None


def test_memory_is_given_up_in_the_process_and_not_only_on_paper(backend: AdvisoryBackend) -> None:
    tensor = torch.ones(1000)
    weak = advisory_records.WeakRef(tensor.untyped_storage())
    pack, record = leave(backend, tensor)
    del tensor
    backend.events()
    assert backend.write(record, 4000)
    assert not weak.expired()
    backend.wait(record)
    assert weak.expired()
    assert backend.version(pack) == 0


def test_a_pack_is_closed_without_waiting_for_the_lock(backend: AdvisoryBackend) -> None:
    pack, record = leave(backend, torch.ones(1000))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with backend._lock:
            held.set()
            done.wait(20)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(20)
    try:
        backend.close_pack(pack)
        backend.close_pack(pack)
        assert backend._records.get(record) is None, "its memory goes at once"
    finally:
        done.set()
        other.join()
    assert backend.events() == [Gone(record)]


def test_a_record_that_autograd_lets_go_of_while_it_leaves_is_gone_when_it_landed(backend: AdvisoryBackend) -> None:
    pack, record = leave(backend, torch.ones(1000))
    backend.events()
    assert backend.write(record, 4000)
    backend.close_pack(pack)
    assert backend._records.get(record) is not None, "the transfer still reads its memory"
    backend.wait(record)
    assert Gone(record) in backend.events() + backend.events()
    assert backend._store.used_bytes == 0


def test_what_was_unpacked_while_leaving_can_be_saved_again_after_its_graph_has_gone(tmp_path: Path) -> None:
    slow = Throttle(FileMedium([tmp_path]), write_bytes_per_s=1e6)
    backend = AdvisoryBackend(slow, verify=False, reason=REASON)
    try:
        pack, record = leave(backend, torch.ones(100_000))
        backend.events()
        assert backend.write(record, 400_000)
        unpacked = backend.tensor(pack, torch.float32)
        assert unpacked is not None
        backend.close_pack(pack)
        again = backend.pack(unpacked)
        assert (again.record, again.is_new) == (record, False)
        backend.wait(record)
        assert backend.events() == [Held(record)]
        assert backend.tensor(again.pack, torch.float32) is not None
    finally:
        backend.close()


def test_a_storage_that_outlives_its_record_is_still_accounted_for(backend: AdvisoryBackend) -> None:
    backend.open(budget_bytes=2**40, on_pressure=lambda need: 0)
    before_bytes = backend.usage().live_bytes
    tensor = torch.ones(1000)
    packed = backend.pack(tensor)
    backend.close_pack(packed.pack)
    assert backend.usage().live_bytes == before_bytes + 4000
    del tensor
    backend.refresh_static()
    assert backend.usage().live_bytes == before_bytes


def test_a_gradient_that_no_python_object_stands_for_is_accounted_for(backend: AdvisoryBackend) -> None:
    x = torch.ones(1000, requires_grad=True)
    backend.refresh_static()
    before_bytes = backend.usage().live_bytes
    (x * 2).sum().backward()
    backend.refresh_static()
    assert backend.usage().live_bytes == before_bytes + 4000


def test_saving_what_existed_already_takes_no_more_memory(backend: AdvisoryBackend) -> None:
    batch = torch.ones(1000)
    backend.refresh_static()
    before = backend.usage()
    backend.pack(batch)
    assert backend.usage() == before


def test_what_exists_between_steps_is_counted_once(tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    with lowtide.fit(model, budget="1GiB", spill=tmp_path) as tide:
        before_bytes = int(str(tide.stats()["static_bytes"]))
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(64, 256)
        for _ in range(2):
            with tide.step():
                model(x).square().sum().backward()
                optimizer.step()
        with tide.step():
            pass
        static_bytes = int(str(tide.stats()["static_bytes"])) - before_bytes
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    counters_bytes = sum(state["step"].nbytes for state in optimizer.state.values())
    # The batch, gradients and both moments; what was saved of the batch was given back.
    assert static_bytes == x.nbytes + 3 * parameter_bytes + counters_bytes


# ---- faults and the end ----


def pressed_chain(tide: lowtide.Tide, x: Tensor) -> Tensor:
    with tide.step():
        out = chain(x, 8).sum()
        out.backward()
    assert x.grad is not None
    found, x.grad = x.grad, None
    return found


def tight(spill: Path) -> int:
    with lowtide.fit(budget="1GiB", spill=spill) as tide:
        return int(str(tide.stats()["static_bytes"])) + 5 * MIB


def chain_gradient() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(MIB // 4, requires_grad=True)
    chain(x, 8).sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    return x, expected


@pytest.mark.parametrize("kind", [FaultKind.ENOSPC, FaultKind.EIO])
def test_a_failed_write_keeps_the_data_in_memory_and_says_so(kind: FaultKind, tmp_path: Path) -> None:
    x, expected = chain_gradient()
    faults = [Fault(direction=Direction.WRITE, nth=2, kind=kind, lasting=True)]
    with lowtide.fit(budget=tight(tmp_path), spill=Faulty(FileMedium([tmp_path]), script=faults)) as tide:
        with pytest.warns(RuntimeWarning, match="keeping the data in memory"):
            assert torch.equal(pressed_chain(tide, x), expected)
        assert torch.equal(pressed_chain(tide, x), expected)
        assert over_budget_bytes(tide) > 0


def test_a_full_spill_keeps_the_data_in_memory(tmp_path: Path) -> None:
    x, expected = chain_gradient()
    budget = {"cpu": tight(tmp_path), "disk": 2 * MIB}
    with lowtide.fit(budget=budget, spill=tmp_path) as tide:
        assert torch.equal(pressed_chain(tide, x), expected)
        assert int(str(tide.stats()["swapped_out_bytes"])) == 2 * MIB
        # A warning may be an exception, so it waits for a place where that does no harm.
        with pytest.warns(RuntimeWarning, match="no room"):
            assert torch.equal(pressed_chain(tide, x), expected)


@pytest.mark.parametrize(
    ("kind", "error"),
    [(FaultKind.EIO, SpillError), (FaultKind.SHORT_READ, SpillError), (FaultKind.FLIP, SpillCorrupted)],
)
def test_a_failed_read_is_an_error_and_the_next_step_is_exact(
    kind: FaultKind, error: type[SpillError], tmp_path: Path
) -> None:
    x, expected = chain_gradient()
    medium = Faulty(FileMedium([tmp_path]), script=[Fault(direction=Direction.READ, nth=2, kind=kind)])
    with lowtide.fit(budget=tight(tmp_path), spill=medium, verify=True) as tide:
        with pytest.raises(error, match="saved for backward") as caught:
            pressed_chain(tide, x)
        assert caught.type is error
        caught.value.__traceback__ = None
        del caught
        gc.collect()
        x.grad = None
        assert torch.equal(pressed_chain(tide, x), expected)


def test_a_graph_outlives_its_tide(tmp_path: Path) -> None:
    x, expected = chain_gradient()
    with lowtide.fit(budget=tight(tmp_path), spill=tmp_path) as tide:
        with tide.step():
            out = chain(x, 8).sum()
        assert int(str(tide.stats()["swapped_out_bytes"])) > 0
    out.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_after_an_exception_nothing_is_brought_back(tmp_path: Path) -> None:
    x, _ = chain_gradient()
    out: list[Tensor] = []

    def forward_only() -> None:
        with tide, tide.step():
            out.append(chain(x, 8).sum())
            raise KeyError("the user's own")

    tide = lowtide.fit(budget=tight(tmp_path), spill=tmp_path)
    with pytest.raises(KeyError):
        forward_only()
    assert int(str(tide.stats()["swapped_in_bytes"])) == 0
    with pytest.raises(SpillError, match="closed before backward"):
        out[0].backward()
    out.clear()
    assert list(tmp_path.iterdir()) == []


def test_what_is_leaving_at_the_end_stays(tmp_path: Path) -> None:
    begun = threading.Event()

    def sleep(seconds: float) -> None:
        begun.set()
        time.sleep(seconds)

    slow = Throttle(FileMedium([tmp_path]), write_bytes_per_s=1e6, sleep=sleep)
    backend = AdvisoryBackend(slow, verify=False, reason=REASON)
    left = [leave(backend, torch.full((50_000,), float(index))) for index in range(4)]
    backend.events()
    for _, record in left:
        assert backend.write(record, 200_000)
    assert begun.wait(20)
    backend.close(bring_back=False)  # some writes are under way, others have not begun
    for index, (pack, _) in enumerate(left):
        got = backend.tensor(pack, torch.float32)
        assert got is not None
        assert bool((got == index).all())


def test_a_second_tide_waits_for_the_first_to_be_closed(tmp_path: Path) -> None:
    with lowtide.fit(budget="1GiB", spill=tmp_path), pytest.raises(BadArgument, match="another tide is open"):
        lowtide.fit(budget="1GiB", spill=tmp_path)
    lowtide.fit(budget="1GiB", spill=tmp_path).close()


def test_a_budget_below_what_exists_already_is_refused(backend: AdvisoryBackend) -> None:
    kept = torch.zeros(MIB)
    with pytest.raises(BudgetTooSmall, match="that exist take that much already") as refused:
        backend.open(budget_bytes=kept.nbytes - 1, on_pressure=lambda need: 0)
    assert refused.value.needed_bytes >= kept.nbytes


def test_a_full_tier_is_told_apart_from_a_held_record(tmp_path: Path) -> None:
    backend = AdvisoryBackend(FileMedium([tmp_path], capacity_bytes=4096), verify=False, reason=REASON)
    try:
        _, small = leave(backend, torch.ones(1000))
        _, large = leave(backend, torch.ones(10_000))
        backend.events()
        with pytest.raises(SpillFull):
            backend.write(large, 40_000)
        assert backend.write(small, 4000)
    finally:
        with pytest.warns(RuntimeWarning, match="no room"):
            backend.close()
