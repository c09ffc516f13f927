"""Tracebacks of a script as Python shows them, without the frames of Lowtide; tables that cut nothing off."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli import doctor, output

CHAIN = """
def fail():
    try:
        {}["gone"]
    except KeyError as error:
        raise ValueError("no such thing") from error

fail()
"""


def python(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True, env=os.environ)


@pytest.mark.parametrize("source", [CHAIN, "x = (\n", "import torch\nx = torch.ones(3).view(2)\n"])
def test_a_script_fails_under_lowtide_with_the_words_and_the_code_of_python(tmp_path: Path, source: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    plain = python(path)
    managed = python("-m", "lowtide.cli", "run", "--quiet", "--budget", "1GiB", path)
    assert plain.returncode == managed.returncode == 1
    assert managed.stderr == plain.stderr


def raised_through(frames: list[str]) -> list[str]:
    """Return the files that are shown of an error that came through `frames`, innermost last."""

    def fail() -> None:
        raise RuntimeError("deep inside")

    run = fail
    for filename in reversed(frames):
        scope: dict[str, Any] = {"inner": run}
        exec(compile("def run():\n    inner()\n", filename, "exec"), scope)
        run = scope["run"]
    with pytest.raises(RuntimeError, match="deep inside") as caught:
        run()
    # The first frame is this function's, the last that of `fail`.
    stack = traceback.extract_tb(caught.value.__traceback__)[1:-1]
    assert [frame.filename for frame in stack] == frames
    return [frame.filename for frame in output._of_the_script(stack)]


CLI = str(output._PACKAGE / "cli" / "run.py")
RUNPY = "<frozen runpy>"
RUNTIME = str(output._PACKAGE / "execute" / "step" / "runtime.py")
HOOKS = str(output._PACKAGE / "execute" / "step" / "saved.py")
KEPT = str(output._PACKAGE / "autograd" / "kept.py")
DEMO = str(output._PACKAGE / "cli" / "demo_train.py")


@pytest.mark.parametrize(
    ("frames", "shown"),
    [
        ([CLI, RUNPY, RUNPY, "train.py", "torch.py"], ["train.py", "torch.py"]),
        ([CLI, RUNPY, "train.py", RUNPY, "other.py"], ["train.py", RUNPY, "other.py"]),
        ([CLI, RUNPY, "train.py", "torch.py", RUNTIME, "model.py"], ["train.py", "torch.py", "model.py"]),
        # Autograd leaves this check to the hooks: the error is the script's.
        ([CLI, RUNPY, "train.py", "torch.py", RUNTIME, HOOKS], ["train.py", "torch.py"]),
        ([CLI, RUNPY, "train.py", "torch.py", RUNTIME, KEPT], ["train.py", "torch.py"]),
        # A bug of Lowtide: its frames are what a report needs.
        ([CLI, RUNPY, "train.py", "torch.py", RUNTIME, RUNTIME], ["train.py", "torch.py", RUNTIME, RUNTIME]),
        ([CLI, RUNTIME], [CLI, RUNTIME]),
        # A script that lies in Lowtide's own directory.
        ([CLI, RUNPY, DEMO, "torch.py", RUNTIME, HOOKS], [DEMO, "torch.py"]),
        ([CLI, RUNPY], []),
    ],
)
def test_which_frames_are_shown(frames: list[str], shown: list[str]) -> None:
    assert raised_through(frames) == shown


def test_a_long_path_is_whole_in_a_window_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = "/" + "/".join(["directory"] * 12) + "/liblowtide.so"
    finding = doctor.Finding(what="native part", verdict=doctor.Verdict.OK, detail=f"built here ({path})")
    doctor._print([finding])
    told = capsys.readouterr().out
    output.console().print(output.facts("title", [("page", path)]))
    for text in (told, capsys.readouterr().out):
        assert max(map(len, text.splitlines())) <= 80
        assert path in "".join(text.split())
