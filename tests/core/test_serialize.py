from __future__ import annotations

import gzip
import json
import math
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core import serialize
from lowtide.core.machine import Link, Machine
from lowtide.core.plan import Address, Plan, Problem, Recompute, Swap
from lowtide.core.timeline import Lane, Span, Timeline
from lowtide.core.trace import Gap, Kind, Op, Phase, Reach, Save, Storage, Trace
from lowtide.errors import TraceError
from lowtide.estimate import machine
from lowtide.plan.policies.auto import Auto
from lowtide.testing.traces import chain_trace, links, problems, residual_trace, touched_traces, traces, training_trace

TRACE = replace(residual_trace(3), model="résnet", torch_version="2.x")
TRACE = replace(TRACE, ops=tuple(replace(op, flops=3e9 * k) for k, op in enumerate(TRACE.ops)))
TOUCHED = training_trace(3, least_bytes=4096)
MACHINE = Machine(
    name="box",
    links={
        "spill": Link(write_bytes_per_s=1 / 3e-9, read_bytes_per_s=2e9, write_latency_s=0.1 + 0.2, duplex=True),
        "null": Link(write_bytes_per_s=math.inf, read_bytes_per_s=math.inf, idle_speedup=2.25),
    },
    source="measured",
    flops_per_s=1.4e13,
    memory_bytes_per_s=9e11,
    capacity_bytes=16 << 30,
    page_bytes=4096,
    page_fault_s=2e-5,
)
PLAN = Auto().plan(Problem(trace=TRACE, machine=MACHINE, budget_bytes=TRACE.peak_bytes // 2))
GAP = Gap(storage=1, after_op=4, before_op=9)
PLAN = replace(
    PLAN,
    swaps=(*PLAN.swaps, Swap(gap=GAP, fetch_op=7, tier="cpu", codec="zstd", landed_op=5, arrived_op=8)),
    recomputes=(Recompute(gap=replace(GAP, storage=2), ops=(1, 2)), Recompute(gap=replace(GAP, storage=3), ops=())),
    layout=(Address(block=1, from_op=4, offset_bytes=1 << 40), Address(block=1, from_op=7, offset_bytes=0)),
    trials=12,
)
TIMELINE = Timeline(
    policy="auto",
    machine="box",
    model="résnet",
    budget_bytes=1 << 30,
    step_s=0.1 + 0.2,
    compute_s=0.2,
    recompute_s=0.05,
    stall_s=0.05,
    peak_bytes=1 << 29,
    reserved_peak_bytes=1 << 30,
    moved_out_bytes=7,
    moved_in_bytes=6,
    spans=(
        Span(lane=Lane.COMPUTE, start_s=0.0, end_s=0.1, op=0),
        Span(lane=Lane.OUT, start_s=0.1, end_s=0.1 + 0.2, op=1, storage=3, nbytes=7, tier="spill", cause="plan"),
        Span(lane=Lane.STALL, start_s=0.1, end_s=0.15, op=1, cause="room"),
    ),
    memory=((0.0, 5), (0.1, 12), (0.1, 3)),
    notes=("a", "b"),
    trials=3,
)
VALUES = (TRACE, TOUCHED, MACHINE, PLAN, TIMELINE)


def rewritten(value: serialize.Saveable, change: Callable[[dict[str, Any]], None]) -> bytes:
    document = json.loads(gzip.decompress(serialize.dumps(value)))
    change(document)
    return gzip.compress(json.dumps(document).encode())


def refused(content: bytes) -> str:
    with pytest.raises(TraceError) as caught:
        serialize.loads(content, source="x.trace")
    message = str(caught.value)
    assert "\n" not in message
    assert "x.trace" in message
    assert len(message) < 300
    return message


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_saved_value_is_loaded_exactly(value: serialize.Saveable, tmp_path: Path) -> None:
    path = tmp_path / "file"
    serialize.save(value, path)
    assert serialize.load(path) == value
    assert serialize.dumps(value) == path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


@given(trace=traces() | touched_traces(), link=links())
@settings(max_examples=60, deadline=None)
def test_any_trace_and_machine_come_back_exactly(trace: Trace, link: Link) -> None:
    machine = Machine(name="m", links={"a": link})
    assert serialize.loads(serialize.dumps(trace)) == trace
    assert serialize.loads(serialize.dumps(machine)) == machine


@given(problem=problems())
@settings(max_examples=30, deadline=None)
def test_any_plan_comes_back_exactly(problem: Problem) -> None:
    plan = Auto().plan(problem)
    assert serialize.loads(serialize.dumps(plan)) == plan


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    serialize.save(PLAN, path)
    assert serialize.load_plan(path) == PLAN
    with pytest.raises(TraceError, match="holds a plan, not a trace"):
        serialize.load_trace(path)
    with pytest.raises(TraceError, match="holds a plan, not a machine"):
        serialize.load_machine(path)
    with pytest.raises(TraceError, match="holds a plan, not a timeline"):
        serialize.load_timeline(path)
    serialize.save(TIMELINE, path)
    assert serialize.load_timeline(path) == TIMELINE


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_newer_version_is_refused_with_both_numbers(value: serialize.Saveable) -> None:
    message = refused(rewritten(value, lambda document: document.update(version=7)))
    assert "version 7" in message
    current = {Timeline: 2, Machine: 4, Plan: 4}.get(type(value), 3)
    assert f"version {current}: upgrade Lowtide" in message


def as_version_1(value: serialize.Saveable, *, version: int) -> bytes:
    """A file without what version 2 and later ones added, labelled with a version."""

    def shrink(document: dict[str, Any]) -> None:
        if isinstance(value, Trace):
            document["ops"]["start_s"] = [op.start_s for op in value.ops]
            del document["ops"]["flops"], document["reach"], document["least_bytes"]
        elif isinstance(value, Machine):
            for name in ("flops_per_s", "memory_bytes_per_s", "capacity_bytes", "page_bytes", "page_fault_s"):
                del document[name]
            for link in document["links"].values():
                del link["idle_speedup"]
        else:
            del document["trials"], document["recomputes"], document["prediction"]["recompute_s"]
            del document["swaps"]["landed_op"], document["swaps"]["arrived_op"]
        document["version"] = version

    return rewritten(value, shrink)


def test_a_file_of_version_1_is_read_with_defaults_for_what_came_later() -> None:
    old_trace = replace(TRACE, ops=tuple(replace(op, flops=0.0) for op in TRACE.ops))
    assert serialize.loads(as_version_1(TRACE, version=1)) == old_trace
    old_links = {tier: replace(link, idle_speedup=1.0) for tier, link in MACHINE.links.items()}
    old_machine = Machine(name="box", links=old_links, source="measured")
    assert serialize.loads(as_version_1(MACHINE, version=1)) == old_machine
    assert PLAN.prediction is not None
    assert serialize.loads(as_version_1(PLAN, version=1)) == replace(
        PLAN,
        layout=(),
        swaps=tuple(replace(swap, landed_op=None, arrived_op=None) for swap in PLAN.swaps),
        recomputes=(),
        trials=0,
        prediction=replace(PLAN.prediction, recompute_s=0.0),
    )


@pytest.mark.parametrize("value", [TRACE, MACHINE, PLAN], ids=lambda value: type(value).__name__)
def test_a_file_of_version_2_without_what_came_with_it_is_damaged(value: serialize.Saveable) -> None:
    assert "damaged" in refused(as_version_1(value, version=2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("write_bytes_per_s", 0),
        ("read_bytes_per_s", -1.0),
        ("read_bytes_per_s", "nan"),
        ("write_latency_s", -1e-3),
        ("read_latency_s", "inf"),
        ("idle_speedup", 0),
        ("idle_speedup", -1),
    ],
)
def test_a_link_that_cannot_be_is_damaged(name: str, value: object) -> None:
    def change(document: dict[str, Any]) -> None:
        document["links"]["spill"][name] = value

    assert f"{name} of 'spill' is" in refused(rewritten(MACHINE, change))


@pytest.mark.parametrize(
    ("name", "value"),
    [("flops_per_s", 0), ("memory_bytes_per_s", -1.0), ("capacity_bytes", -5), ("page_bytes", 0), ("page_fault_s", -1)],
)
def test_a_machine_that_cannot_be_is_damaged(name: str, value: object) -> None:
    def change(document: dict[str, Any]) -> None:
        document[name] = value

    assert f"{name} is {value}" in refused(rewritten(MACHINE, change))


def test_an_integer_that_no_array_holds_is_damaged() -> None:
    def change(document: dict[str, Any]) -> None:
        document["capacity_bytes"] = 2**70

    assert "64 bits" in refused(rewritten(MACHINE, change))


def test_a_machine_of_version_2_has_links_of_one_rate_and_one_of_version_3_says_its_own() -> None:
    def shrink(document: dict[str, Any]) -> None:
        for link in document["links"].values():
            del link["idle_speedup"]

    def label(document: dict[str, Any]) -> None:
        shrink(document)
        document["version"] = 2

    links = {tier: replace(link, idle_speedup=1.0) for tier, link in MACHINE.links.items()}
    assert serialize.loads(rewritten(MACHINE, label)) == replace(MACHINE, links=links)
    assert "damaged" in refused(rewritten(MACHINE, shrink))


def test_older_plans_place_nothing_and_older_steps_know_no_slow_memory() -> None:
    def older_plan(document: dict[str, Any]) -> None:
        del document["places"], document["layout"], document["prediction"]["slow_s"]
        document["version"] = 2

    def without_layout(document: dict[str, Any]) -> None:
        del document["layout"]
        document["version"] = 3

    def older_step(document: dict[str, Any]) -> None:
        del document["slow_s"], document["tier_bytes"]
        document["version"] = 1

    assert serialize.loads(rewritten(PLAN, older_plan)) == replace(PLAN, layout=())
    assert serialize.loads(rewritten(PLAN, without_layout)) == replace(PLAN, layout=())
    assert serialize.loads(rewritten(TIMELINE, older_step)) == TIMELINE
    assert "damaged" in refused(rewritten(PLAN, lambda document: document.pop("places")))
    assert "damaged" in refused(rewritten(PLAN, lambda document: document.pop("layout")))
    assert "damaged" in refused(rewritten(TIMELINE, lambda document: document.pop("tier_bytes")))


def test_a_machine_of_version_3_has_tiers_that_nobody_reads_in_place() -> None:
    later = ("waited_write_bytes_per_s", "waited_read_bytes_per_s", "capacity_bytes", "page_bytes", "access")

    def shrink(document: dict[str, Any]) -> None:
        for link in document["links"].values():
            for name in later:
                del link[name]

    def label(document: dict[str, Any]) -> None:
        shrink(document)
        document["version"] = 3

    slow = machine("optane")
    plain = {
        tier: replace(
            link, waited_write_bytes_per_s=None, waited_read_bytes_per_s=None, capacity_bytes=None, access=None
        )
        for tier, link in slow.links.items()
    }
    assert slow.addressable == ("spill",)
    assert serialize.loads(rewritten(slow, label)) == replace(slow, links=plain)
    assert "damaged" in refused(rewritten(slow, shrink))


@pytest.mark.parametrize(
    ("name", "value"),
    [("read_bytes_per_s", 0), ("write_bytes_per_s", -1.0), ("mixed_share", 0), ("latency_s", -1), ("latency_s", "inf")],
)
def test_slow_memory_that_cannot_be_is_damaged(name: str, value: object) -> None:
    def change(document: dict[str, Any]) -> None:
        document["links"]["spill"]["access"][name] = value

    assert f"{name} in place of 'spill' is" in refused(rewritten(machine("optane"), change))


OLD_TRACE = Trace(
    ops=(
        Op(name="aten::mm", phase=Phase.FORWARD, start_s=0.0, duration_s=0.5, peak_bytes=30, reads=(0,), writes=(1,)),
        Op(name="aten::mul", phase=Phase.BACKWARD, start_s=0.5, duration_s=0.25, peak_bytes=40, reads=(1,), module="b"),
    ),
    storages=(
        Storage(nbytes=20, kind=Kind.PARAM, first_op=-1, last_op=2),
        Storage(nbytes=10, kind=Kind.ACTIVATION, first_op=0, last_op=1, producer=0),
    ),
    saves=(Save(storage=1, packed_op=0, free_op=1, uses=(1,), released_op=2),),
    static_bytes=20,
    model="old",
    torch_version="2.x",
)


def old_document(version: int) -> dict[str, Any]:
    """A trace as that version wrote it, literally."""
    document: dict[str, Any] = {
        "format": "lowtide.trace",
        "version": version,
        "model": "old",
        "device": "cpu",
        "torch_version": "2.x",
        "static_bytes": 20,
        "names": ["aten::mm", "aten::mul"],
        "modules": ["", "b"],
        "ops": {
            "name": [0, 1],
            "module": [0, 1],
            "start_s": [0.0, 0.5],
            "phase": ["forward", "backward"],
            "duration_s": [0.5, 0.25],
            "peak_bytes": [30, 40],
            "reads": [[0], [1]],
            "writes": [[1], []],
        },
        "storages": {
            "nbytes": [20, 10],
            "kind": ["param", "activation"],
            "first_op": [-1, 0],
            "last_op": [2, 1],
            "producer": [None, 0],
            "versions": [0, 0],
        },
        "saves": {
            "storage": [1],
            "packed_op": [0],
            "free_op": [1],
            "uses": [[1]],
            "released_op": [2],
            "packs": [1],
        },
    }
    if version >= 2:
        document["ops"].update(start_s=None, flops=[0.0, 0.0])
    return document


def packed(document: dict[str, Any]) -> bytes:
    return gzip.compress(json.dumps(document).encode())


@pytest.mark.parametrize("version", [1, 2])
def test_a_trace_from_before_version_3_moves_what_autograd_saved(version: int) -> None:
    loaded = serialize.loads(packed(old_document(version)))
    assert loaded == OLD_TRACE
    assert (OLD_TRACE.reach, OLD_TRACE.least_bytes) == (Reach.SAVED, 0)


@pytest.mark.parametrize("version", [1, 2])
def test_an_old_trace_may_carry_fields_that_mean_something_today(version: int) -> None:
    assert serialize.loads(packed({**old_document(version), "reach": "touched", "least_bytes": 9})) == OLD_TRACE


def test_a_trace_of_version_3_says_what_can_move() -> None:
    document = {**old_document(2), "version": 3, "reach": "touched", "least_bytes": 11}
    assert serialize.loads(packed(document)) == replace(OLD_TRACE, reach=Reach.TOUCHED, least_bytes=11)
    for missing in ("reach", "least_bytes"):
        assert f"lacks '{missing}'" in refused(packed({k: v for k, v in document.items() if k != missing}))
    assert "'everything' is not a reach" in refused(packed({**document, "reach": "everything"}))
    assert "least bytes -1" in refused(packed({**document, "least_bytes": -1}))
    assert "not an integer" in refused(packed({**document, "least_bytes": 1.5}))


def test_starts_that_are_no_sums_of_durations_are_kept() -> None:
    late = replace(TRACE, ops=(*TRACE.ops[:-1], replace(TRACE.ops[-1], start_s=99.0)))
    assert serialize.loads(serialize.dumps(late)) == late


def test_an_impossible_version_is_damage() -> None:
    for version in (0, -1, "1", None, 1.0, True):
        assert "damaged" in refused(rewritten(TRACE, lambda document, v=version: document.update(version=v)))


def test_what_is_no_lowtide_file_is_refused() -> None:
    for content in (b"", b"hello", gzip.compress(b"hello"), gzip.compress(b"[1]"), gzip.compress(b'{"format":"zip"}')):
        refused(content)
    assert "trace, machine, plan or timeline" in refused(gzip.compress(b'{"format":"trace","version":1}'))


@given(position=st.integers(0), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_a_flipped_bit_is_refused_or_harmless(position: int, bit: int) -> None:
    content = bytearray(serialize.dumps(chain_trace(3)))
    content[position % len(content)] ^= 1 << bit
    try:
        loaded = serialize.loads(bytes(content))
    except TraceError:
        return
    # gzip's header holds a time and a system name that do not matter.
    assert loaded == chain_trace(3)


@pytest.mark.parametrize("kept", [0, 1, 20, -1, -9])
def test_a_cut_file_is_refused(kept: int) -> None:
    refused(serialize.dumps(TRACE)[:kept])


DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a missing column": lambda d: d["ops"].pop("reads"),
    "a missing field": lambda d: d.pop("static_bytes"),
    "columns of different lengths": lambda d: d["ops"]["duration_s"].pop(),
    "a negative duration": lambda d: d["ops"]["duration_s"].__setitem__(0, -1e-3),
    "an endless duration": lambda d: d["ops"]["duration_s"].__setitem__(0, "inf"),
    "a storage that does not exist": lambda d: d["saves"]["storage"].__setitem__(0, 99),
    "a negative storage": lambda d: d["saves"]["storage"].__setitem__(0, -1),
    "an operand that does not exist": lambda d: d["ops"]["reads"].__setitem__(3, [99]),
    "a producer that does not exist": lambda d: d["storages"]["producer"].__setitem__(0, 10_000),
    "a use after the step": lambda d: d["saves"]["uses"].__setitem__(0, [10_000]),
    "an unknown phase": lambda d: d["ops"]["phase"].__setitem__(0, "sideways"),
    "an unknown kind": lambda d: d["storages"]["kind"].__setitem__(0, []),
    "a name outside of the table": lambda d: d["ops"]["name"].__setitem__(0, -1),
    "text for a number": lambda d: d["ops"]["duration_s"].__setitem__(0, "1.0"),
    "a number for text": lambda d: d.update(model=3),
    "a fraction for bytes": lambda d: d["ops"]["peak_bytes"].__setitem__(0, 1.5),
    "a truth for bytes": lambda d: d["storages"]["nbytes"].__setitem__(0, True),
    "negative bytes": lambda d: d["storages"]["nbytes"].__setitem__(0, -1),
    "a list for an object": lambda d: d.update(ops=[]),
    "an object for a list": lambda d: d["ops"].update(reads={}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_trace_with_damage_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    assert "damaged" in refused(rewritten(TRACE, damage))


def test_a_machine_or_plan_with_damage_is_refused() -> None:
    assert "damaged" in refused(rewritten(MACHINE, lambda d: d["links"]["spill"].update(duplex=1)))
    assert "damaged" in refused(rewritten(MACHINE, lambda d: d["links"]["spill"].pop("read_bytes_per_s")))
    assert "damaged" in refused(rewritten(PLAN, lambda d: d["swaps"]["fetch_op"].pop()))
    assert "damaged" in refused(rewritten(PLAN, lambda d: d["prediction"].update(step_s=None)))
    assert "damaged" in refused(rewritten(PLAN, lambda d: d["recomputes"]["ops"].__setitem__(0, [1.5])))
    assert "damaged" in refused(rewritten(PLAN, lambda d: d["recomputes"]["ops"].pop()))
    assert "damaged" in refused(rewritten(TIMELINE, lambda d: d["spans"]["start"].__setitem__(0, 99)))
    assert "damaged" in refused(rewritten(TIMELINE, lambda d: d["spans"]["lane"].__setitem__(0, "sideways")))
    assert "damaged" in refused(rewritten(TIMELINE, lambda d: d["memory"]["at"].pop()))
    assert "damaged" in refused(rewritten(TIMELINE, lambda d: d["moments"].__setitem__(0, None)))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    serialize.save(TRACE, path)

    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        serialize.save(PLAN, path)
    assert serialize.load(path) == TRACE
    assert list(tmp_path.iterdir()) == [path]


def test_a_long_trace_is_compact() -> None:
    trace = chain_trace(2000)
    assert len(serialize.dumps(trace)) < 30 * len(trace.ops)


def test_a_long_timeline_is_compact() -> None:
    spans = tuple(Span(lane=Lane.COMPUTE, start_s=k * 1.1e-3, end_s=(k + 1) * 1.1e-3, op=k) for k in range(4000))
    timeline = replace(TIMELINE, spans=spans, memory=tuple((span.start_s, span.op << 20) for span in spans))
    assert len(serialize.dumps(timeline)) < 30 * len(spans)


def test_a_number_of_hundreds_of_digits_is_damage() -> None:
    def damage(document: dict[str, Any]) -> None:
        document["ops"]["duration_s"][0] = 10**400

    line = refused(rewritten(TRACE, damage))
    assert "401 digits" in line
    assert len(line) < 300


def test_a_file_that_would_fill_the_memory_is_refused_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialize, "_MOST_BYTES", 1 << 20)
    bomb = gzip.compress(b" " * (64 << 20))
    assert len(bomb) < 1 << 17
    tracemalloc.start()
    try:
        assert "holds more than 1.00 MiB" in refused(bomb)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
