"""Every bad argument: one line on stderr that says what to do, exit code 2, and nothing started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import registry
from lowtide.cli import VERBS, main
from lowtide.memory import budget

GOOD = "--budget=1GiB"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError('the script must not start')\n")
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line that `lowtide argv` prints when it refuses."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("lowtide: ")
    return lines[0]


@pytest.mark.parametrize(
    ("budget", "hint"),
    [
        ("0", "more than zero"),
        ("0GiB", "more than zero"),
        ("-1GiB", "more than zero"),
        ("2parsecs", "unknown unit 'parsecs'"),
        ("2G", "GiB (binary) or GB (decimal)"),
        ("much", "a number and a unit"),
        ("", "a number and a unit"),
        ("gpu=1GiB", "unknown tier 'gpu' in the budget: the tiers are cpu (memory), disk (the spill) and, for a"),
        ("cpu=1GiB,gpu=1GiB", "device or its name such as cuda:0; write cpu=2GiB,disk=40GiB"),
        ("cpu=1GiB,device=0", "device budget"),
        ("cuda:0=2parsecs", "unknown unit 'parsecs'"),
        ("cpu=1GiB,5", "cpu=2GiB,disk=40GiB"),
        ("cpu=1GiB,cpu=2GiB", "twice"),
        ("disk=1GiB", "no 'cpu' bytes"),
        ("cpu=1GiB,disk=0", "disk budget"),
    ],
)
def test_run_refuses_a_bad_budget(capsys: pytest.CaptureFixture[str], script: str, budget: str, hint: str) -> None:
    assert hint in refused(capsys, "run", f"--budget={budget}", script)


def test_run_refuses_a_missing_budget(capsys: pytest.CaptureFixture[str], script: str) -> None:
    assert "'--budget'" in refused(capsys, "run", script)


def test_run_refuses_a_script_that_does_not_exist(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "gone.py does not exist: check the path" in refused(capsys, "run", GOOD, str(tmp_path / "gone.py"))


def test_run_refuses_a_directory_as_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "is a directory" in refused(capsys, "run", GOOD, str(tmp_path))


def test_run_refuses_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'SCRIPT'" in refused(capsys, "run", GOOD)


def test_run_refuses_an_unknown_policy_and_lists_the_known(capsys: pytest.CaptureFixture[str], script: str) -> None:
    line = refused(capsys, "run", GOOD, "--policy=magic", script)
    assert "'magic'" in line
    assert "auto" in line


def test_run_refuses_a_missing_spill_directory(capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path) -> None:
    line = refused(capsys, "run", GOOD, "--spill", str(tmp_path), "--spill", str(tmp_path / "no"), script)
    assert "does not exist: create it" in line


def test_run_refuses_a_file_as_spill_directory(capsys: pytest.CaptureFixture[str], script: str) -> None:
    assert "is not a directory" in refused(capsys, "run", GOOD, "--spill", script, script)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("tape:///x", "unknown tier 'tape'"),
        ("file+zip:///tmp", "unknown codec 'zip'"),
        ("file+fp16:///tmp", "codec 'fp16' is lossy"),
    ],
)
def test_run_refuses_a_tier_or_codec_in_one_line(
    url: str, words: str, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    assert words in refused(capsys, "run", GOOD, "--spill", url, script)


def test_run_refuses_a_spill_directory_that_cannot_be_written(capsys: pytest.CaptureFixture[str], script: str) -> None:
    # /proc refuses new files even to root, to whom permission bits mean nothing.
    line = refused(capsys, "run", GOOD, "--spill", "/proc", script)
    assert "cannot be written" in line
    assert "--spill" in line


def test_run_refuses_an_output_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path
) -> None:
    line = refused(capsys, "run", GOOD, "--json", str(tmp_path / "no" / "stats.json"), script)
    assert "cannot be written" in line
    assert "is a directory" in refused(capsys, "run", GOOD, "--json", str(tmp_path), script)


def test_an_unknown_option_or_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str], script: str) -> None:
    line = refused(capsys, "run", "--bugdet=1GiB", script)
    assert line == "lowtide: no such option '--bugdet': did you mean '--budget'? (see 'lowtide run --help')"
    assert "see 'lowtide --help'" in refused(capsys, "rnu")


def test_plan_refuses_bad_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = str(tmp_path / "step.trace")
    assert "lowtide capture" in refused(capsys, "plan", trace)
    assert "pass one of them" in refused(capsys, "plan", "--floor", GOOD, trace)
    assert "more than zero" in refused(capsys, "plan", "--budget=0", trace)
    assert "'magic'" in refused(capsys, "plan", "--policy=magic", trace)
    Path(trace).write_bytes(b"no trace at all")
    assert "step.trace" in refused(capsys, "plan", trace)


def test_capture_refuses_bad_arguments(capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path) -> None:
    output = str(tmp_path / "step.trace")
    assert "'--output'" in refused(capsys, "capture", script)
    assert "--steps 1 or more" in refused(capsys, "capture", "-o", output, "--steps=0", script)
    assert "does not exist" in refused(capsys, "capture", "-o", output, str(tmp_path / "gone.py"))
    assert "cannot be written" in refused(capsys, "capture", "-o", str(tmp_path / "no" / "x"), script)


def test_probe_and_demo_refuse_bad_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "create it" in refused(capsys, "probe", "--spill", str(tmp_path / "no"))
    assert "create it" in refused(capsys, "demo", "--spill", str(tmp_path / "no"))
    assert "more than zero" in refused(capsys, "demo", "--budget", "0")
    assert "--steps 2 or more" in refused(capsys, "demo", "--steps", "1")


def test_bad_arguments_leave_nothing_behind(capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path) -> None:
    refused(capsys, "run", GOOD, "--spill", str(tmp_path), "--json", str(tmp_path / "s.json"), "--policy=magic", script)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_shows_an_example(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: lowtide {verb}" in text
    assert f"\n    lowtide {verb}" in text


@pytest.mark.parametrize("argv", [[], *([verb] for verb in VERBS)])
def test_help_is_whole_in_a_window_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*argv, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 79] == []
    # That is how click cuts off what does not fit.
    assert [line for line in lines if line.endswith("...") and not line.startswith("Usage:")] == []


def test_help_lists_every_verb_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    commands = text.partition("Commands:\n")[2].splitlines()
    starts = [line for line in commands if not line.startswith("   ")]
    assert [line.split()[0] for line in starts] == list(VERBS)
    assert all(len(line.split()) > 3 for line in starts)
    assert main([]) == 0
    assert capsys.readouterr().out == text


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lowtide ")


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["run", "--help"], ["policies"], ["run", "--budget=0", "x.py"], ["run", "--budget=1GiB", "gone.py"]],
)
def test_help_and_bad_arguments_do_not_import_torch(argv: list[str], tmp_path: Path) -> None:
    program = f"import sys; from lowtide.cli import main; main({argv!r}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lowtide.cli", "run", "--budget", "1XB", "x.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "unknown unit 'XB'" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "--budget", "50%", "--out", "{trace}", "{trace}"),
        ("simulate", "--budget", "50%", "--perfetto", "{trace}", "{trace}"),
        ("simulate", "--budget", "50%", "--out", "{same}", "--perfetto", "{same}", "{trace}"),
        ("compare", "--json", "{trace}", "{trace}"),
        ("report", "--budget", "50%", "-o", "{trace}", "{trace}"),
        ("report", "--budget", "50%", "-o", "{link}", "{trace}"),
        ("capture", "-o", "{script}", "{script}"),
        ("run", "--budget", "1GiB", "--json", "{script}", "{script}"),
    ],
)
def test_an_output_that_is_another_file_of_the_command_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    script, trace, link = tmp_path / "train.py", tmp_path / "step.trace", tmp_path / "link"
    script.write_text("print('ran')\n")
    trace.write_bytes((Path(__file__).parents[1] / "data" / "vgg.trace").read_bytes())
    link.symlink_to(trace)
    before = script.read_bytes(), trace.read_bytes()
    names = {"script": script, "trace": trace, "link": link, "same": tmp_path / "same"}
    assert "would overwrite another file" in refused(capsys, *(part.format(**names) for part in command))
    assert (script.read_bytes(), trace.read_bytes()) == before
    assert not (tmp_path / "same").exists()


@pytest.mark.parametrize(
    "command", [("plan",), ("estimate", "--machine", "v100", "--model", "alexnet", "--batch", "64")]
)
def test_plan_and_estimate_take_a_share_of_what_activations_add(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    trace = [str(Path(__file__).parents[1] / "data" / "resnet.trace")] if command == ("plan",) else []
    assert main([*command, "--budget", "90%", "--json", *trace]) == 0
    said = json.loads(capsys.readouterr().out)
    static_bytes, peak_bytes = said["static_bytes"], said["peak_bytes"]
    assert said["budget_bytes"] == static_bytes + int(0.9 * (peak_bytes - static_bytes))
    assert "cannot read budget '0%'" in refused(capsys, *command, "--budget", "0%", *trace)
    assert "unknown unit" in refused(capsys, *command, "--budget", "1XB", *trace)


def test_a_file_that_is_missing_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = str(Path(__file__).parents[1] / "data" / "vgg.trace")
    assert "does not exist" in refused(capsys, "report", "-o", str(tmp_path / "x.html"), str(tmp_path / "no.json"))
    assert "machine file ./no.machine does not exist" in refused(capsys, "estimate", "--machine", "./no.machine", trace)


def test_a_verb_that_is_nearly_right_is_answered_with_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'run'?" in refused(capsys, "rnu")
    assert "lowtide run --budget 2GiB train.py" in refused(capsys, "train.py")


def test_policies_are_found_whatever_their_capitals_and_hyphens(capsys: pytest.CaptureFixture[str]) -> None:
    assert registry.registered_name("VDNN") == "vdnn"
    assert registry.registered_name("swap-all") == "swap_all"
    assert "did you mean 'capuchin'?" in refused(capsys, "run", GOOD, "--policy=capucin", __file__)
    assert "did you mean 'v100'" in refused(capsys, "estimate", "--model", "vgg16", "--machine", "v10")


def test_a_budget_may_be_a_share_of_auto_and_needs_a_unit_where_it_is_small(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = budget.MemoryLimit(source="host memory", limit_bytes=2**40, left_bytes=8 * 2**30)
    monkeypatch.setattr(budget, "memory_limits", lambda **_: (limit,))
    whole = budget.parse_budget("auto").fast_bytes
    assert budget.parse_budget("50%").fast_bytes == whole // 2
    assert "add a unit, such as '2GiB'" in refused(capsys, "run", "--budget=2", __file__)
    assert "write '50%'" in refused(capsys, "run", "--budget=150%", __file__)
    assert budget.parse_budget(4096).fast_bytes == 4096, "an int is bytes"


def test_run_refuses_a_module_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert "module nosuch.train does not exist" in refused(capsys, "run", GOOD, "-m", "nosuch.train")


@pytest.mark.parametrize("budget", ["100", "1.5", "0.25", " 64 "])
def test_a_small_budget_without_a_unit_asks_for_one(
    capsys: pytest.CaptureFixture[str], script: str, budget: str
) -> None:
    assert f"add a unit, such as '{budget.strip()}GiB'" in refused(capsys, "run", f"--budget={budget}", script)
    assert "add a unit, such as '2000MiB'" in refused(capsys, "run", "--budget=2000", script)


@pytest.mark.parametrize("argv", [("plan", "--floor"), ("simulate", GOOD), ("report", GOOD, "--out=page.html")])
def test_a_script_where_a_trace_is_wanted_is_answered_with_the_way_to_one(
    capsys: pytest.CaptureFixture[str], script: str, argv: tuple[str, ...]
) -> None:
    assert f"lowtide capture -o step.trace {script}" in refused(capsys, *argv, script)


def test_a_file_of_another_kind_is_refused_without_internals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a trace")
    said = refused(capsys, "plan", "--floor", str(other))
    assert "is not a Lowtide file" in said
    assert "gzip" not in said


def test_a_machine_that_is_nearly_right_is_answered_in_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "estimate", "--model", "vgg16", "--machine", "v10")
    assert "did you mean 'v100'? the presets are" in said


@pytest.mark.parametrize(
    ("argv", "example"),
    [
        (("run", "train.py"), "'--budget': write for example 'lowtide run --budget 2GiB train.py --epochs 3'"),
        (("run", GOOD), "'SCRIPT': write for example 'lowtide run --budget 2GiB train.py --epochs 3'"),
        (("estimate", "--model", "vgg16"), "'--machine': write for example 'lowtide estimate --model resnet50"),
        (("report", "step.trace"), "'--out': write for example 'lowtide report step.trace --budget 2GiB -o"),
        (("capture", "train.py"), "'--output': write for example 'lowtide capture -o step.trace train.py"),
    ],
)
def test_a_missing_option_is_answered_with_an_example_that_has_it(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], example: str
) -> None:
    assert example in refused(capsys, *argv)


def test_a_file_with_a_similar_name_is_offered(
    capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step.trace").touch()
    wrong = str(tmp_path / "trian.py")
    assert f"{wrong} does not exist: did you mean '{script}'?" in refused(capsys, "run", GOOD, wrong)
    monkeypatch.chdir(tmp_path)
    assert "trian.py does not exist: did you mean 'train.py'?" in refused(capsys, "run", GOOD, "trian.py")
    assert "stp.trace does not exist: did you mean 'step.trace'?" in refused(capsys, "plan", "stp.trace")
    assert "else.py does not exist: check the path" in refused(capsys, "run", GOOD, "else.py")


@pytest.mark.parametrize(
    ("said", "name"),
    [("vDNN++", "vdnn_pp"), ("swapall", "swap_all"), (" Swap All ", "swap_all"), ("DeepTM:a/B.zip", "deeptm:a/B.zip")],
)
def test_a_policy_is_found_by_the_letters_of_its_name(said: str, name: str) -> None:
    assert registry.registered_name(said) == name


def test_a_codec_that_is_nearly_right_is_answered_with_the_right_one(
    capsys: pytest.CaptureFixture[str], script: str
) -> None:
    assert "unknown codec 'zcv': did you mean 'zvc'" in refused(capsys, "run", GOOD, "--codecs=zcv", script)
