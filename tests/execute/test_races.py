"""Whatever the order in which threads, transfers and allocations meet: no deadlock, no wrong bit, no byte too many."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.memory.native import Native, load
from lowtide.tiers import FileMedium, Latency
from tests import models
from tests.execute.training import Need, Training, away_bytes, digest, need

STEPS = 4


class Jitter:
    """Sleeps that differ from call to call, the same for the same seed; some are none at all."""

    def __init__(self, seed: int, longest_s: float = 0.004) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._longest_s = longest_s

    def __call__(self, _seconds: float) -> None:
        with self._lock:
            seconds = self._random.choice([0.0, 0.0, self._random.random() ** 3 * self._longest_s])
        if seconds:
            time.sleep(seconds)


def jittery(directory: Path, seed: int) -> Latency:
    return Latency(FileMedium([directory]), write_s=1, read_s=1, sleep=Jitter(seed))


def small_cnn() -> nn.Module:
    return models.cnn(channels=8, depth=4)


def cnn_training() -> Training:
    return Training(small_cnn, shape=(8, 3, 24, 24))


TRAININGS: dict[str, Callable[[], Training]] = {"mlp": Training, "cnn": cnn_training}


@pytest.fixture(scope="module")
def needs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Need]:
    return {name: need(make, tmp_path_factory.mktemp(name)) for name, make in TRAININGS.items()}


@pytest.fixture(scope="module")
def stocks() -> dict[str, dict[str, object]]:
    return {name: make().steps(STEPS).result() for name, make in TRAININGS.items()}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["lru", "auto", "swap_all"])
@pytest.mark.parametrize("name", TRAININGS)
def test_random_latencies_change_nothing_but_the_time(
    name: str,
    policy: str,
    seed: int,
    needs: dict[str, Need],
    stocks: dict[str, dict[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = 2 + seed % 3
    start = Native.ranges_start
    monkeypatch.setattr(Native, "ranges_start", lambda self, **options: start(self, **{**options, "threads": threads}))
    budget = needs[name].floor(1.12)
    training = TRAININGS[name]()
    with lowtide.fit(
        training.model, training.optimizer, budget=budget, spill=jittery(tmp_path, seed), policy=policy
    ) as tide:
        training.steps(STEPS, tide.step)
        stats: dict[str, Any] = tide.stats()
    assert training.result() == stocks[name]
    assert stats["peak_reserved_bytes"] <= budget
    assert stats["swapped_out_bytes"] > 0
    assert away_bytes() == 0


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_files_without_python_in_between_are_as_exact(
    policy: str, needs: dict[str, Need], stocks: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    for _ in range(3):
        training = Training()
        with lowtide.fit(
            training.model, training.optimizer, budget=needs["mlp"].floor(1.1), spill=tmp_path, policy=policy
        ) as tide:
            training.steps(STEPS, tide.step)
        assert training.result() == stocks["mlp"]


@pytest.mark.parametrize("seed", range(2))
def test_another_thread_may_allocate_and_free_all_the_while(
    seed: int, needs: dict[str, Need], stocks: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    most = 1 << 20
    budget = needs["mlp"].share(0.5) + most + (64 << 10)
    training, done, failures = Training(), threading.Event(), []

    def churn() -> None:
        rng = random.Random(seed)
        held: list[tuple[Tensor, float]] = []
        while not done.is_set():
            while sum(tensor.nbytes for tensor, _ in held) > most // 2:
                tensor, value = held.pop(rng.randrange(len(held)))
                if tensor[0] != value or tensor[-1] != value:
                    failures.append(f"{tensor} was {value}")
            value = float(rng.randrange(1000))
            held.append((torch.full((rng.choice([10, 1000, 30_000, 70_000]),), value), value))
            if rng.random() < 0.1:
                time.sleep(0.001)

    with lowtide.fit(
        training.model, training.optimizer, budget=budget, spill=jittery(tmp_path, seed), policy="auto"
    ) as tide:
        thread = threading.Thread(target=churn)
        thread.start()
        try:
            training.steps(STEPS + 4, tide.step)
        finally:
            done.set()
            thread.join(60)
        assert tide.stats()["peak_reserved_bytes"] <= budget  # type: ignore[operator]
        assert tide.stats()["swapped_out_bytes"] > 0  # type: ignore[operator]
    assert not failures
    expected = Training().steps(STEPS + 4)
    assert training.result() == expected.result()


def _work(seed: int) -> tuple[nn.Module, Callable[[], str]]:
    """A model and a pass over it, whose gradients are returned in short."""
    torch.manual_seed(seed)
    model = models.mlp(depth=5)
    x = torch.randn(400 + 30 * seed, 128)

    def run() -> str:
        model.zero_grad()
        model(x).square().mean().backward()
        return "".join(digest(parameter.grad) for parameter in model.parameters())

    return model, run


@pytest.mark.parametrize("seed", range(2))
def test_threads_with_models_of_their_own_may_share_a_tide(seed: int, tmp_path: Path) -> None:
    works = [_work(number) for number in range(2)]
    expected = [run() for _, run in works]
    for model, _ in works:
        model.zero_grad()
    with lowtide.fit([model for model, _ in works], budget=64 << 20, spill=tmp_path) as tide:
        with tide.step():
            [run() for _, run in works]
        stats: dict[str, Any] = tide.stats()
        floor = tide.trace().floor_bytes()
        for model, _ in works:
            model.zero_grad()
    budget = floor + (stats["peak_bytes"] - stats["static_bytes"])
    got: list[list[str]] = [[], []]
    failures: list[BaseException] = []

    def repeat(number: int) -> None:
        try:
            for _ in range(6):
                got[number].append(works[number][1]())
        except BaseException as error:  # noqa: BLE001  # a thread has nobody to raise to
            failures.append(error)

    with lowtide.fit(
        [model for model, _ in works], budget=budget, spill=jittery(tmp_path, seed), policy="swap_all"
    ) as tide:
        with tide.step():  # one step by one thread, so that there is a plan that the two together do not match
            works[0][1]()
        with tide.step():
            threads = [threading.Thread(target=repeat, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(80)
            assert not any(thread.is_alive() for thread in threads), "deadlock"
        stats = tide.stats()
    assert not failures
    assert got == [[expected[0]] * 6, [expected[1]] * 6]
    assert stats["peak_reserved_bytes"] <= budget
    assert away_bytes() == 0


def test_backward_may_run_on_another_thread_than_forward(needs: dict[str, Need], tmp_path: Path) -> None:
    expected = Training()
    expected.backward_only()
    training = Training()
    with lowtide.fit(training.model, budget=needs["mlp"].share(0.5), spill=jittery(tmp_path, 1), policy="lru") as tide:
        with tide.step():
            loss = training.loss()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
            del thread
        assert tide.stats()["swapped_in_bytes"] > 0  # type: ignore[operator]
    for ours, theirs in zip(training.model.parameters(), expected.model.parameters(), strict=True):
        assert digest(ours.grad) == digest(theirs.grad)


def test_a_tensor_let_go_of_while_its_write_is_under_way_is_freed_when_it_lands(tmp_path: Path) -> None:
    medium = Latency(FileMedium([tmp_path]), write_s=0.1)
    with lowtide.fit(budget=1 << 30, spill=medium, policy="swap_all") as tide:
        live = load().counters().live_bytes
        for _ in range(3):  # the second and third follow a plan that writes at once
            with tide.step():
                x = torch.randn(300, 300, requires_grad=True)
                y = (x * 2).sin().exp().sum()
                del x, y
        with tide.step():
            pass
        load().settle()
        assert away_bytes() == 0
        assert load().counters().live_bytes == live


def test_a_saved_tensor_changed_after_it_was_handed_out_is_noticed_as_without_lowtide(tmp_path: Path) -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = x * 2
            ctx.save_for_backward(kept)
            return kept.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (kept,) = ctx.saved_tensors
            return grad.mul(kept.mul_(3.0))

    def twice() -> None:
        x = torch.ones(200, 200, requires_grad=True)
        loss = Spoils.apply(x).sum()  # type: ignore[no-untyped-call]
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice()
    with (
        lowtide.fit(budget=1 << 30, spill=tmp_path) as tide,
        pytest.raises(RuntimeError, match="modified by an inplace"),
    ):
        with tide.step():
            twice()
