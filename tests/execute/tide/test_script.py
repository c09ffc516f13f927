"""An unmodified script inside a budget: it sees what `python script.py` shows it, and its steps are found."""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide import capture_script
from lowtide.core.step_record import Expected, StepRecord
from lowtide.core.trace import Kind, Phase
from lowtide.errors import BadArgument
from lowtide.execute.tide import script
from lowtide.execute.tide.script import run_script
from tests.execute.training import other_bytes

Write = Callable[[str], Path]

TRAIN = """
    import json, sys
    from pathlib import Path
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        x = torch.randn(512, 128, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    Path(sys.argv[1]).write_text(json.dumps(losses))
"""

GAN = """
    import json, sys
    from pathlib import Path
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)

    def net():
        return torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())])

    maker, judge = net(), net()
    make_better = torch.optim.SGD(maker.parameters(), lr=1e-2, momentum=0.9)
    judge_better = torch.optim.AdamW(judge.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        noise = torch.randn(512, 128, generator=torch.Generator().manual_seed(step))
        made = maker(noise)
        judged = (judge(made.detach()) - judge(noise)).square().mean()
        judge_better.zero_grad()
        judged.backward()
        judge_better.step()
        fooled = judge(made).square().mean()
        make_better.zero_grad()
        fooled.backward()
        make_better.step()
        losses += [judged.item(), fooled.item()]
    Path(sys.argv[1]).write_text(json.dumps(losses))
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(source: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(source))
        return path

    return put


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    path = tmp_path / "spill"
    path.mkdir()
    return path


def plain(path: Path, out: Path) -> list[float]:
    """Run a script without Lowtide; return the losses that it wrote."""
    run_as_python_does(path, [str(out)])
    losses: list[float] = json.loads(out.read_text())
    return losses


def run_as_python_does(path: Path, argv: list[str]) -> None:
    import runpy

    before = sys.argv
    sys.argv = [str(path), *argv]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before


@pytest.mark.parametrize(("source", "optimizers"), [(TRAIN, 1), (GAN, 2)])
def test_losses_are_the_scripts_own_and_a_step_has_one_of_each_optimizer(
    source: str, optimizers: int, write: Write, spill: Path, tmp_path: Path
) -> None:
    path, out = write(source), tmp_path / "losses.json"
    expected = plain(path, out)
    stats = run_script(path, [str(out)], budget=64 << 20, spill=spill)
    assert json.loads(out.read_text()) == expected
    assert stats["steps"] == 4
    assert stats["optimizer_steps"] == 4 * optimizers
    assert stats["swapped_out_bytes"] == 0
    static, peak = stats["static_bytes"], stats["peak_bytes"]
    assert isinstance(static, int)
    assert isinstance(peak, int)
    tight = static + int(0.65 * (peak - static))
    stats = run_script(path, [str(out)], budget=tight, spill=spill)
    assert json.loads(out.read_text()) == expected
    assert stats["steps"] == 4
    assert stats["optimizer_steps"] == 4 * optimizers
    assert stats["swapped_out_bytes"] > 0  # type: ignore[operator]
    assert stats["peak_reserved_bytes"] <= tight  # type: ignore[operator]
    assert stats["exit_code"] == 0
    assert list(spill.iterdir()) == []


def test_the_script_sees_its_arguments_its_directory_and_that_it_is_main(
    write: Write, spill: Path, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 42\n")
    path = write(
        """
        import sys
        from pathlib import Path
        import beside
        Path(sys.argv[1]).write_text(repr((sys.argv, __name__, __file__, beside.VALUE, sys.path[0])))
        """
    )
    out = tmp_path / "seen"
    before = (sys.argv, sys.path[:])
    stats = run_script(path, [str(out), "--flag", "x"], budget=64 << 20, spill=spill)
    seen = eval(out.read_text())
    assert seen == ([str(path), str(out), "--flag", "x"], "__main__", str(path), 42, str(tmp_path))
    assert (sys.argv, sys.path) == before
    assert stats["exit_code"] == 0
    assert stats["steps"] == 0


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("sys.exit('no luck')", 1), ("raise SystemExit", 0)],
)
def test_the_scripts_exit_code_is_passed_on(
    ending: str, code: int, write: Write, spill: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = run_script(write(f"import sys\n{ending}\n"), [], budget=64 << 20, spill=spill)
    assert stats["exit_code"] == code
    assert ("no luck" in capsys.readouterr().err) == ("no luck" in ending)


def test_what_the_script_raises_comes_through(write: Write, spill: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_script(write("1 / 0"), [], budget=64 << 20, spill=spill)
    run_script(write("pass"), [], budget=64 << 20, spill=spill)  # the tide before is closed: another one may be opened


def test_an_error_of_the_script_that_only_looks_like_ours_stays_what_it_is(write: Write, spill: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="mine"):
        run_script(write("import torch\nraise torch.OutOfMemoryError('mine')"), [], budget=64 << 20, spill=spill)


def test_a_refused_allocation_becomes_budget_too_small_with_operator_and_bytes(write: Write, spill: Path) -> None:
    path = write("import torch\nx = torch.ones(1 << 20)\ny = torch.cos(x)\n")
    budget = other_bytes() + (6 << 20)
    with pytest.raises(lowtide.BudgetTooSmall) as raised:
        run_script(path, [], budget=budget, spill=spill)
    assert raised.value.op == "aten::cos"
    assert raised.value.budget_bytes == budget
    assert raised.value.needed_bytes >= budget + (2 << 20)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_a_script_may_catch_the_refusal_itself(write: Write, spill: Path, tmp_path: Path) -> None:
    path = write(
        """
        import sys
        from pathlib import Path
        import torch
        try:
            torch.ones(1 << 24)
        except torch.OutOfMemoryError as error:
            Path(sys.argv[1]).write_text(str(error))
        """
    )
    out = tmp_path / "error"
    assert run_script(path, [str(out)], budget=other_bytes() + (10 << 20), spill=spill)["exit_code"] == 0
    assert "the budget is" in out.read_text()


def test_a_script_without_an_optimizer_runs_and_is_managed(write: Write, spill: Path, tmp_path: Path) -> None:
    path = write(
        """
        import sys
        from pathlib import Path
        import torch
        torch.manual_seed(1)
        x = torch.randn(512, 128, requires_grad=True)
        y = x
        for _ in range(16):
            y = (y * 1.01).tanh()
        y.sum().backward()
        Path(sys.argv[1]).write_text(x.grad.sum().item().hex())
        """
    )
    out = tmp_path / "grad"
    run_as_python_does(path, [str(out)])
    expected = out.read_text()
    stats = run_script(path, [str(out)], budget=other_bytes() + (3 << 20), spill=spill, policy="lru")
    assert out.read_text() == expected
    assert stats["swapped_in_bytes"] > 0  # type: ignore[operator]
    assert stats["steps"] == 0


def test_an_optimizer_inside_no_grad_or_inference_leaves_global_state_as_it_was(write: Write, spill: Path) -> None:
    run_script(write("import torch\ntorch.set_grad_enabled(False)\n"), [], budget=64 << 20, spill=spill)
    assert torch.is_grad_enabled()


# ---- capture ----


def test_a_scripts_step_is_captured_and_the_rest_of_it_not_run(write: Write, tmp_path: Path) -> None:
    path, out = write(TRAIN), tmp_path / "losses.json"
    trace = capture_script(path, [str(out)])
    assert not out.exists()
    names = [op.name for op in trace.ops]
    assert names.count("aten::gelu") == 8
    assert names.count("aten::gelu_backward") == 8
    kinds = {storage.kind for storage in trace.storages}
    assert {Kind.PARAM, Kind.OPTIMIZER, Kind.ACTIVATION} <= kinds
    assert {trace.storages[gap.storage].kind for gap in trace.gaps()} >= {Kind.PARAM, Kind.OPTIMIZER, Kind.ACTIVATION}


def test_a_script_without_a_training_step_cannot_be_captured(write: Write) -> None:
    with pytest.raises(BadArgument, match="without an optimizer step"):
        capture_script(write("pass"), [])


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_a_script_whose_tensors_are_too_small_to_move_is_captured_and_needs_what_it_has(
    write: Write, steps: int
) -> None:
    small = """
        import torch
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    """
    trace = capture_script(write(small), [], steps=steps)
    assert trace.gaps() == ()
    assert trace.floor_bytes() == trace.peak_bytes


def test_a_script_that_ends_early_is_captured_from_the_steps_it_did(write: Write, tmp_path: Path) -> None:
    out = tmp_path / "losses.json"
    with pytest.warns(RuntimeWarning, match="ended before a step to count them in"):
        trace = capture_script(write(TRAIN.replace("range(4)", "range(1)")), [str(out)], steps=5)
    assert out.exists()
    assert [op.name for op in trace.ops].count("aten::gelu") == 8


def test_a_script_that_catches_every_exception_does_not_swallow_the_end_of_capture(
    write: Write, tmp_path: Path
) -> None:
    source = TRAIN.replace(
        "        optimizer.step()\n",
        "        try:\n            optimizer.step()\n        except Exception:\n            pass\n",
    )
    assert source != TRAIN
    out = tmp_path / "losses.json"
    capture_script(write(source), [str(out)])
    assert not out.exists()


def test_statistics_are_ready_for_json(write: Write, spill: Path, tmp_path: Path) -> None:
    stats: dict[str, Any] = run_script(write(TRAIN), [str(tmp_path / "out")], budget=64 << 20, spill=spill)
    assert json.loads(json.dumps(stats)) == stats
    assert stats["policy"] == "auto"
    assert stats["unmanaged"] == {}


EVALUATE = """
    import sys
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(256, 256)

        def forward(self, x):
            return self.inner(x).relu()

    model = torch.nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(int(sys.argv[1])):
        model(torch.randn(1024, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(60):
                model(torch.randn(1024, 256))
"""
PARAMETER_BYTES = 2 * (256 * 256 + 256) * 4


def test_the_last_steps_peak_is_a_steps_and_not_of_what_follows_it(write: Write, spill: Path) -> None:
    stats = run_script(write(EVALUATE), ["4"], budget=64 << 20, spill=spill)
    assert int(str(stats["last_step_peak_bytes"])) >= int(str(stats["static_bytes"])) + 2 * 1024 * 256 * 4


def test_evaluation_between_steps_is_in_no_steps_time_and_in_no_prediction_for_it(
    write: Write, spill: Path, monkeypatch: Any
) -> None:
    """Sixty forward passes take many times as long as the one forward and backward pass of a step."""
    times_s: list[float] = []
    records: list[StepRecord] = []
    add = script.Iterations.add

    def added(self: script.Iterations, *, begins: bool, took_s: float, expected: Expected | None) -> None:
        times_s.append(took_s)
        add(self, begins=begins, took_s=took_s, expected=expected)

    monkeypatch.setattr(script.Iterations, "add", added)
    stats = run_script(write(EVALUATE), ["9"], budget=4 << 20, spill=spill, on_step=records.append)
    assert stats["step_s"] == pytest.approx(statistics.median(times_s))
    assert sum(record.step_s for record in records[1:]) > 4 * sum(times_s[1:]), "evaluation lies between the steps"
    planned = [
        (took_s, record.expected)
        for took_s, record in zip(times_s, records, strict=True)
        if record.expected is not None
    ]
    _, last = planned[-1]
    assert last.unmanaged_s > 4 * last.training.unmanaged_s > 0, "nor is it in what a step is compared with"
    assert stats["predicted_unmanaged_step_s"] == last.training.unmanaged_s
    assert stats["predicted_slowdown"] == last.training.slowdown
    slowdowns = [took_s / expected.training.unmanaged_s for took_s, expected in planned]
    assert stats["slowdown"] == pytest.approx(statistics.median(slowdowns))


def test_an_iteration_has_the_time_and_the_prediction_of_all_of_its_steps() -> None:
    """Until the end of an iteration is known, each optimizer's step is a step of the tide."""
    iterations = script.Iterations()
    for begins, expected in [
        (True, None),
        (False, Expected(unmanaged_s=0.1)),  # an iteration that was predicted in part has no slowdown
        (True, Expected(unmanaged_s=0.6, planned_s=0.9)),
        (False, Expected(unmanaged_s=2.2, planned_s=2.3, before_training_s=2.0)),
        (True, Expected(unmanaged_s=0.3, planned_s=0.45, before_training_s=0.05)),
    ]:
        iterations.add(begins=begins, took_s=0.5, expected=expected)
    stats = iterations.stats()
    assert (stats["steps"], stats["step_s"], stats["last_step_s"]) == (3, 1.0, 0.5)
    assert stats["predicted_unmanaged_step_s"] == pytest.approx(0.25)
    assert stats["predicted_slowdown"] == pytest.approx(0.4 / 0.25)
    assert stats["slowdown"] == pytest.approx((1.0 / 0.8 + 0.5 / 0.25) / 2)


TWO_OPTIMIZERS = """
import torch

model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
first = torch.optim.SGD(model[:7].parameters(), lr=0.1)
second = torch.optim.SGD(model[7].parameters(), lr=0.1)
for _ in range(8):
    for optimizer in (first, second):
        optimizer.zero_grad()
    model(torch.randn(2048, 256)).square().mean().backward()
    first.step()
    second.step()
"""


def test_a_script_with_two_optimizers_is_compared_with_its_whole_step(write: Write, spill: Path) -> None:
    records: list[StepRecord] = []
    stats = run_script(write(TWO_OPTIMIZERS), [], budget=12 << 20, spill=spill, on_step=records.append)
    assert (stats["steps"], stats["optimizer_steps"]) == (8, 16)
    assert len(records) == 2 * 2 + 6, "twice each optimizer's step is a step; from then on all of them are one"
    assert stats["last_step_peak_bytes"] == records[-1].peak_bytes > 8 * 2048 * 256 * 4 // 2
    unmanaged_s, step_s = float(str(stats["predicted_unmanaged_step_s"])), float(str(stats["step_s"]))
    # The second optimizer's step alone takes a hundredth of the iteration.
    assert step_s / 10 < unmanaged_s < step_s * 2


def test_a_captured_script_with_two_optimizers_shows_its_whole_step(write: Write) -> None:
    trace = capture_script(write(TWO_OPTIMIZERS), [])
    products = [op for op in trace.ops if op.name in ("aten::addmm", "aten::mm")]
    assert len(products) == 8 + 8 + 7, "forward and backward of every layer; the first has no gradient of its input"
    assert all(op.flops == 2 * 2048 * 256 * 256 for op in products)
    last = max(index for index, op in enumerate(trace.ops) if op in products)
    assert len({op.start_s for op in trace.ops[last:] if op.phase is Phase.UPDATE}) >= 16, "both optimizers' updates"


def test_a_captured_script_shows_the_steady_step_with_its_layers_by_name(write: Write) -> None:
    path = write(EVALUATE)
    trace = capture_script(path, ["5"])
    assert trace.static_bytes >= 3 * PARAMETER_BYTES, "parameters and both moments are there before the step"
    assert not [op.name for op in trace.ops if "uniform_" in op.name], "the model was made long before"
    assert trace.model == path.name
    assert {"0.inner", "1.inner"} <= {op.module for op in trace.ops}


def test_a_model_that_the_script_gives_up_is_not_kept(write: Write, spill: Path, tmp_path: Path) -> None:
    path = write(
        EVALUATE + "\n    import weakref, gc\n    seen = weakref.ref(model)\n    del model, optimizer, _\n"
        "    gc.collect()\n    assert seen() is None\n"
    )
    run_script(path, ["2"], budget=64 << 20, spill=spill)


NARROW = """
    import sys
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(512, 24), torch.nn.ReLU(), torch.nn.Linear(24, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(int(sys.argv[1])):
        model(torch.randn(1024, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_blocks_too_small_to_move_are_not_called_another_allocators(write: Write, spill: Path) -> None:
    stats = run_script(write(NARROW), ["2"], budget=7 << 20, spill=spill)
    assert stats["swapped_out_bytes"] != 0, "nothing was looked at"
    assert stats["unmanaged"] == {}, "a weight of 48 KiB is no range, and counts in the budget"
