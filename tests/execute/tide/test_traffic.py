"""Transfers are timed: how fast the link was beside operators, and while the program waited."""

from __future__ import annotations

from pathlib import Path

import pytest

import lowtide
from lowtide.core.machine import Link, Machine
from lowtide.estimate.calibrate import SPILL
from lowtide.estimate.traffic import Traffic
from lowtide.execute.tide import opening
from lowtide.execute.tide.cpu import CpuTide
from lowtide.execute.tide.tide import Tide
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.tiers import FileMedium
from lowtide.tiers.wrappers import Throttle
from tests.execute.training import Need, Training

SAID = Link(write_bytes_per_s=1e12, read_bytes_per_s=1e12)


def traffic_of(tide: Tide) -> Traffic:
    assert isinstance(tide, CpuTide)
    return tide.traffic()


def test_every_byte_that_moves_is_timed(tmp_path: Path, mlp_need: Need) -> None:
    training = Training()
    with lowtide.fit(
        training.model, training.optimizer, budget=mlp_need.share(0.3), spill=tmp_path, policy=SwapAll()
    ) as tide:
        assert tide.machine_seen().links == tide.machine.links, "nothing has moved yet"
        training.steps(4, tide.step)
        stats, traffic = tide.stats(), traffic_of(tide)
    assert stats["swapped_out_bytes"] == pytest.approx(traffic.write.nbytes + traffic.write_waited.nbytes)
    assert stats["swapped_in_bytes"] == pytest.approx(traffic.read.nbytes + traffic.read_waited.nbytes)
    assert traffic.read.busy_s + traffic.read_waited.busy_s > 0
    assert traffic.write_waited.busy_s + traffic.read_waited.busy_s <= float(str(stats["stall_s"])) * 1.01


def test_a_link_that_is_slower_than_was_said_is_seen_as_it_is(
    tmp_path: Path, mlp_need: Need, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "machine_for", lambda _: Machine(name="said", links={SPILL: SAID}))
    read_bytes_per_s, write_bytes_per_s = 5e7, 1e8
    slow = Throttle(FileMedium([tmp_path]), read_bytes_per_s=read_bytes_per_s, write_bytes_per_s=write_bytes_per_s)
    training = Training()
    with lowtide.fit(
        training.model, training.optimizer, budget=mlp_need.share(0.3), spill=slow, policy=SwapAll()
    ) as tide:
        while sum(one.nbytes for one in (traffic_of(tide).write_waited, traffic_of(tide).read_waited)) < 64 << 20:
            training.steps(1, tide.step)
        planned_for = tide.machine.links[SPILL]
        assert planned_for.wait_s(planned_for.write_s(1 << 30) + planned_for.read_s(1 << 30)) > 5, "not as it was said"
        machine, traffic = tide.machine_seen(), traffic_of(tide)
    seen = machine.links[SPILL]
    assert machine.source == "seen"
    for moved, rate in ((traffic.write_waited, write_bytes_per_s), (traffic.read_waited, read_bytes_per_s)):
        assert moved.nbytes / moved.busy_s < 2 * rate * 1.1, "both directions at once share the time"
    awaited_s = seen.wait_s(
        seen.write_s(int(traffic.write_waited.nbytes)) + seen.read_s(int(traffic.read_waited.nbytes))
    )
    assert awaited_s == pytest.approx(traffic.write_waited.busy_s + traffic.read_waited.busy_s, rel=1e-6)
