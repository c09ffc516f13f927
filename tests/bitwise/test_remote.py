"""Training over a server's memory is the same to the last bit, with and without TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lowtide
from lowtide.errors import LowtideError
from lowtide.tiers import FileMedium, Slabs, open_medium
from tests.bitwise.harness import stock
from tests.bitwise.record import assert_identical
from tests.bitwise.test_pages import LEAST_BYTES, need, train
from tests.tiers.resp_server import DROP, needs_redis, real_redis, resp_server
from tests.tiers.test_redis_medium import tls_url

__all__ = ["tls_url"]


def halfway(name: str) -> int:
    floor_bytes, peak_bytes = need(name)
    return min(max(int(1.5 * floor_bytes), (floor_bytes + peak_bytes) // 2), peak_bytes - LEAST_BYTES)


@needs_redis
@pytest.mark.parametrize("name", ["mlp", "transformer", pytest.param("cnn", marks=pytest.mark.slow)])
def test_training_over_a_real_server(name: str, tmp_path: Path) -> None:
    with real_redis(tmp_path) as server:
        record, stats, _ = train(name, budget_bytes=halfway(name), spill=server.url)  # type: ignore[arg-type]
        assert_identical(stock(name), record)
        assert stats["swapped_out_bytes"] == stats["remote_written_bytes"] > 0
        assert stats["swapped_in_bytes"] == stats["remote_read_bytes"] > 0
        assert stats["remote_requests"] >= stats["remote_round_trips"] > 0
        assert server.ask("dbsize") == "0"


@needs_redis
def test_training_over_tls(tls_url: str) -> None:
    record, stats, _ = train("mlp", budget_bytes=halfway("mlp"), spill=tls_url)  # type: ignore[arg-type]
    assert_identical(stock("mlp"), record)
    assert stats["remote_read_bytes"] > 0


def test_training_that_drops_connections_again_and_again() -> None:
    with resp_server() as server:
        count = 0

        def script(words: list[bytes]) -> bytes | None:
            nonlocal count
            count += words[0] in (b"GET", b"GETRANGE", b"SETRANGE") and not words[1].endswith(b":mark")
            if count % 50 == 7:
                count += 1
                server.drop_all()
            return None

        server.script = script
        name = "mlp"
        record, stats, _ = train(name, budget_bytes=halfway(name), spill=server.url)  # type: ignore[arg-type]
        assert_identical(stock(name), record)
        assert stats["remote_connections"] > 2


def test_a_server_that_dies_in_a_training_is_told_with_its_address() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
    optimizer = torch.optim.Adam(model.parameters())
    with resp_server() as server:

        def step() -> None:
            with tide.step():
                optimizer.zero_grad()
                model(torch.ones(4, 256)).sum().backward()
                optimizer.step()

        with pytest.raises(LowtideError, match=rf"redis://127.0.0.1:{server.port} cannot be reached") as told:
            with lowtide.fit(model, optimizer, budget="6MiB", spill=server.url) as tide:
                for _ in range(3):
                    step()
                assert tide.stats()["swapped_out_bytes"] > 0
                server.stop()
                for _ in range(2):
                    step()
        assert "\n" not in str(told.value)


@needs_redis
def test_a_server_killed_in_the_middle_of_a_step_takes_only_what_it_alone_held(tmp_path: Path) -> None:
    def training() -> tuple[torch.nn.Sequential, torch.optim.Adam]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
        return model, torch.optim.Adam(model.parameters())

    def step(model: torch.nn.Sequential, optimizer: torch.optim.Adam) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 256)).sum().backward()
        optimizer.step()

    def state(model: torch.nn.Sequential, optimizer: torch.optim.Adam) -> Iterator[np.ndarray[Any, Any]]:
        for parameter in model.parameters():
            yield parameter.detach().numpy()
            yield from (optimizer.state[parameter][name].numpy() for name in ("exp_avg", "exp_avg_sq"))

    model, optimizer = training()
    for _ in range(3):
        step(model, optimizer)
    # Not tensors: those that exist before `fit` leave to the server, too.
    expected = [each.copy() for each in state(model, optimizer)]

    model, optimizer = training()
    with real_redis(tmp_path) as server:
        with pytest.raises(LowtideError, match=rf"redis://127.0.0.1:{server.port} cannot be reached") as told:
            with lowtide.fit(model, optimizer, budget="6MiB", spill=server.url) as tide:
                for _ in range(3):
                    with tide.step():
                        step(model, optimizer)
                model[8].register_forward_pre_hook(lambda *_: server.kill())
                with tide.step():
                    step(model, optimizer)
        assert "\n" not in str(told.value)
    whole = lost = 0
    for now, before in zip(state(model, optimizer), expected, strict=True):
        same = now == before
        assert (same | np.isnan(now)).all(), "it looks like a value of the model, and is not"
        whole += same.all()
        lost += not same.all()
    assert whole
    assert lost, "12 MiB of state were in 6 MiB: some of it was on the server only"


@pytest.mark.parametrize("policy", ["fastswap", "infiniswap"])
def test_training_goes_on_when_a_server_of_several_dies(policy: str, tmp_path: Path) -> None:
    """Infiniswap's acceptance: a server that is killed in the middle of a run loses nothing."""
    name, count = "mlp", 0
    with resp_server() as first, resp_server() as second:

        def die(words: list[bytes]) -> bytes | None:
            nonlocal count
            count += words[0] in (b"SET", b"SETRANGE")
            if count < 60:
                return None
            first.stop()
            return DROP

        # Both servers hold some: slabs are smaller than what leaves.
        slabs = Slabs(
            [open_medium(first.url), open_medium(second.url)], backup=FileMedium([tmp_path]), slab_bytes=256 << 10
        )
        first.script = die
        record, stats, _ = train(name, budget_bytes=halfway(name), spill=slabs, policy=policy)  # type: ignore[arg-type]
        assert_identical(stock(name), record)
        assert stats["servers_lost"] == 1
        assert stats["swapped_in_bytes"] > 0
