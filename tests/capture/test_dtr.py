"""Logs of DTR's simulator become traces and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase as Phases
from hypothesis import given, settings

from lowtide.capture.dtr import dtr_lines, load_dtr, read_dtr, save_dtr
from lowtide.core import serialize
from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.core.trace import Gap, Kind, Phase, Trace
from lowtide.errors import TraceError
from lowtide.plan.policies.auto import Auto
from lowtide.simulate import simulate
from lowtide.testing.traces import chain_trace, machine_of, residual_trace, traces


def line(instruction: str, **fields: Any) -> str:
    return json.dumps({"INSTRUCTION": instruction, **fields})


def constant(name: str, nbytes: int) -> list[str]:
    return [line("CONSTANT", NAME=name), line("MEMORY", NAME=name, MEMORY=str(nbytes))]


def call(name: str, args: list[str], results: dict[str, tuple[int, int]], time: int) -> list[str]:
    lines = [line("CALL", NAME=name, ARGS=args, RESULT=list(results), TIME=str(time))]
    for result, (nbytes, alias) in results.items():
        lines += [
            line("MEMORY", NAME=result, MEMORY=str(nbytes)),
            line("ALIAS", NAME=result, ALIAS=str(alias)),
        ]
    return lines


# x -> conv -> relu_ in place -> a view of it -> loss, and back.
LOG = [
    *constant("ignored", 999),
    line("ANNOTATE", ANNOTATION="START"),
    *constant("x", 100),
    *constant("w", 50),
    *call("conv", ["x", "w"], {"y": (200, -1)}, 1000),
    line("MUTATE", NAME="relu_", ARGS=["y"], MUTATE=[0], TIME="500"),
    *call("view", ["y"], {"v": (200, 0)}, 10),
    line("COPY", DST="y2", SRC="y"),
    line("RELEASE", NAME="y"),
    *call("loss", ["v"], {"l": (4, -1)}, 200),
    line("RELEASE", NAME="v"),
    line("ANNOTATE", ANNOTATION="BACKWARD"),
    *call("loss_back", ["l"], {"g": (200, -1)}, 300),
    *call("conv_back", ["g", "y2", "x", "w"], {"dw": (50, -1)}, 2000),
    line("RELEASE", NAME="y2"),
    line("RELEASE", NAME="g"),
    line("RELEASE", NAME="never seen"),
    line("COPY_FROM", DST="l", SRC="dw"),
]


def test_a_log_becomes_operators_storages_and_what_the_backward_pass_reads() -> None:
    trace = read_dtr(LOG, model="net")
    assert [op.name for op in trace.ops] == ["conv", "relu_", "view", "loss", "loss_back", "conv_back"]
    assert [op.phase for op in trace.ops] == [Phase.FORWARD] * 4 + [Phase.BACKWARD] * 2
    assert trace.duration_s == pytest.approx(4010e-9)
    # 0: x, 1: w, 2: y and its view, 3: l, 4: g, 5: dw
    assert [block.nbytes for block in trace.storages] == [100, 50, 200, 4, 200, 50]
    assert [block.kind for block in trace.storages[:3]] == [Kind.INPUT, Kind.INPUT, Kind.ACTIVATION]
    assert trace.static_bytes == 150
    assert (trace.ops[0].reads, trace.ops[0].writes) == ((0, 1), (2,))
    assert (trace.ops[1].reads, trace.ops[1].writes) == ((2,), (2,))
    assert (trace.ops[2].reads, trace.ops[2].writes) == ((2,), ())
    assert trace.storages[2].versions == 1
    assert (trace.storages[2].first_op, trace.storages[2].last_op) == (0, 5)
    assert (trace.storages[3].last_op, trace.storages[5].last_op) == (5, 6)
    assert [op.peak_bytes for op in trace.ops] == [350, 350, 350, 354, 554, 604]
    assert trace.gaps() == (Gap(storage=2, after_op=4, before_op=5),)


def test_a_trace_comes_back_from_its_log() -> None:
    for trace in (chain_trace(5), residual_trace(2), chain_trace(3, static_bytes=77)):
        back = read_dtr(dtr_lines(trace), model=trace.model)
        assert [(op.name, op.phase, op.reads) for op in back.ops][: len(trace.ops)] == [
            (op.name, op.phase, tuple(storage + bool(trace.static_bytes) for storage in op.reads)) for op in trace.ops
        ]
        assert back.duration_s == pytest.approx(trace.duration_s, rel=1e-6)
        assert back.static_bytes == trace.static_bytes
        shift = 1 if trace.static_bytes else 0
        assert [(gap.storage - shift, gap.after_op, gap.before_op) for gap in back.gaps()] == [
            (gap.storage, gap.after_op, gap.before_op) for gap in trace.gaps()
        ]


def test_a_trace_without_scratch_keeps_its_memory_curve() -> None:
    trace = chain_trace(5)
    assert [op.peak_bytes for op in read_dtr(dtr_lines(trace)).ops] == [op.peak_bytes for op in trace.ops]


@given(trace=traces())
@settings(max_examples=40, deadline=None, phases=[Phases.generate])
def test_any_trace_gives_a_log_that_can_be_read_planned_and_simulated(trace: Trace) -> None:
    back = read_dtr(dtr_lines(trace))
    assert serialize.loads(serialize.dumps(back)) == back
    assert back.duration_s == pytest.approx(trace.duration_s, abs=1e-9 * (len(trace.ops) + 1))
    link = Link(write_bytes_per_s=2e9, read_bytes_per_s=2e9)
    problem = Problem(trace=back, machine=machine_of(link), budget_bytes=max(1, back.floor_bytes()))
    simulate(problem, Auto().plan(problem), policy=Auto(), strict=True)


def test_a_log_is_saved_whole_and_loaded_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "net.log"
    save_dtr(chain_trace(3), path)
    assert list(tmp_path.iterdir()) == [path]
    assert load_dtr(path).model == "net"
    assert load_dtr(path, unit_s=1e-6).duration_s == pytest.approx(1e3 * load_dtr(path).duration_s)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not an instruction"),
        (line("JUMP"), "line 2: 'JUMP' is not an instruction of a DTR log"),
        (line("CALL", NAME="f", ARGS=["nobody"], RESULT=[], TIME="1"), "line 2: 'nobody' is used and was never made"),
        (line("CALL", NAME="f", ARGS=[], RESULT=[], TIME="soon"), "line 2: TIME is missing or not a number"),
        (line("CALL", NAME="f", ARGS=[], RESULT=[], TIME="-1"), "line 2: operator 'f' took -1"),
        (line("CALL", NAME="f", ARGS="x", RESULT=[], TIME="1"), "line 2: ARGS is missing or no list of texts"),
        (line("ALIAS", NAME="y", ALIAS="0"), "line 2: 'y' is not a result of the last operator"),
        (line("MUTATE", NAME="f", ARGS=[], MUTATE=[0], TIME="1"), "line 2: argument 0 is mutated and there are 0"),
        (line("MEMORY", NAME="y", MEMORY="-5"), "line 2: 'y' has -5 bytes"),
    ],
)
def test_a_damaged_log_is_refused_with_the_line(bad: str, expected: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_dtr([line("ANNOTATE", ANNOTATION="START"), bad], source="x.log")
    assert expected in str(caught.value)
    assert "x.log" in str(caught.value)
    assert "\n" not in str(caught.value)
