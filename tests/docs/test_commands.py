"""Every command in the docs is executed, or says here why it is not.

A command is a line that begins with `$ ` in a console block, or an indented line that begins with a program's name.
Those of the pages in QUICK run in `make test`, all of them in `make test-full`. Commands inside sentences are checked
against the options that their verbs have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from lowtide import zoo
from lowtide.capture.fake import capture_fake
from lowtide.cli import VERBS, group, main
from lowtide.core.serialize import save
from lowtide.core.trace import Reach, Trace
from lowtide.estimate.presets import machine
from tests.docs.site_modules import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
PROGRAMS = ("lowtide", "python", "make", "pip", "torchrun", "accelerate")
TIMEOUT_S = 900

# By the beginning of the command: why no test runs it as it stands.
NOT_EXECUTED = {
    "make test": "it is the command that runs this test",
    "make bench": "takes hours; tests/benchmarks runs its parts",
    "make docs": "its own step of .ci/run; tests/docs/test_site.py tests its parts",
    "make demo": "makes a new environment; tests/cli/test_demo.py runs `lowtide demo`",
    "make wheel": "fetches two Debian roots and compiles for many minutes; tests/release tests its parts",
    "pip install": "changes the environment that the tests run in",
    "python benchmarks/": "takes minutes to hours; tests/benchmarks runs its parts, and its options are read below",
    "python -m benchmarks.": "takes minutes to hours; tests/benchmarks runs its parts, and its options are read below",
    "lowtide estimate --model bert_base --batch 16 --machine optane --fast 30% --policy deeptm:": "needs an agent that "
    "was trained for an hour; the agent of the package is used by another command of the page",
    "lowtide run --budget cpu=8GiB,slow=64GiB --slow cxl:": "needs memory behind CXL; tests/execute imitates it",
}
# All commands of each take some seconds.
QUICK = ("howto-budget.md", "howto-slow-memory.md", "howto-watch.md")

TRAIN = """
import torch
model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())])
device = torch.accelerator.current_accelerator() or torch.device("cpu")
model.to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(512, 128, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 1000,
    "n_positions": 128,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
}


def commands_of(text: str) -> Iterator[str]:
    """Yield a page's commands, without their comments."""
    inside = False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```console"
        found = None
        if inside and line.startswith("$ "):
            found = line[2:]
        elif re.match(rf"    ({'|'.join(PROGRAMS)}) ", line):
            found = line
        if found is not None:
            yield re.sub(r"\s+#.*", "", found).strip()


def executed_of(page: Path) -> list[str]:
    """Return the commands of a page that a test executes, in their order."""
    return [command for command in commands_of(page.read_text()) if not command.startswith(tuple(NOT_EXECUTED))]


@pytest.fixture(scope="module")
def step() -> Trace:
    """Return what `lowtide capture` records on a CPU: every touch."""
    return capture_fake(lambda: zoo.build("resnet18", batch=16).training(), reach=Reach.TOUCHED)


@pytest.fixture
def desk(tmp_path: Path, step: Trace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with the files that the docs' commands name."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "train.sh").write_text(f"#!/bin/sh\nexec {sys.executable} train.py\n")
    (tmp_path / "train.sh").chmod(0o755)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(TRAIN)
    (tmp_path / "fast").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    save(step, tmp_path / "step.trace")
    save(machine("optane"), tmp_path / "my-machine.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_pages_have_commands_and_the_lists_have_no_dead_entries() -> None:
    commands = {command for page in PAGES for command in commands_of(page.read_text())}
    assert len(commands) > 40
    assert set(QUICK) <= {page.name for page in PAGES if executed_of(page)}
    for begin in NOT_EXECUTED:
        assert any(command.startswith(begin) for command in commands), f"no page has '{begin}' any more"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.name in QUICK else pytest.mark.slow, id=page.name)
        for page in PAGES
        if executed_of(page)
    ],
)
def test_the_commands_of_a_page_work_one_after_the_other(page: Path, desk: Path) -> None:
    (desk / "bin").mkdir()
    (desk / "bin" / "lowtide").write_text(f'#!/bin/sh\nexec {sys.executable} -m lowtide "$@"\n')
    (desk / "bin" / "lowtide").chmod(0o755)
    path = os.pathsep.join((str(desk / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    for script in re.findall(r"```python\n(# train\.py\n.*?)```", page.read_text(), re.DOTALL):
        (desk / "train.py").write_text(script)
    failed = []
    for command in executed_of(page):
        done = subprocess.run(
            ["bash", "-c", command.replace("/fast/disk", str(desk / "fast"))],
            cwd=desk,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        # 2 with a table: the answer to the question is no, as in "does not fit".
        said_no = done.returncode == 2 and command.split()[1] in ("estimate", "plan") and "floor" in done.stdout
        if done.returncode != 0 and not said_no:
            failed.append((command, done.returncode, done.stdout, done.stderr))
    assert failed == []


class Parsed(Exception):
    """A program has read its arguments, and would begin."""


@pytest.mark.parametrize(
    "command",
    sorted(
        command
        for page in PAGES
        for command in commands_of(page.read_text())
        if command.startswith(("python benchmarks/", "python -m benchmarks."))
    ),
)
def test_a_benchmark_of_the_docs_takes_the_options_that_they_name(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        raise Parsed

    _, program, *words = shlex.split(command)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.chdir(ROOT)
    with pytest.raises(Parsed):
        if program == "-m":
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            monkeypatch.setattr(sys, "argv", [program, *words])
            runpy.run_path(program, run_name="__main__")


SYSTEMS = load("pages").systems((ROOT / "docs" / "systems.md").read_text())


@pytest.mark.parametrize(
    "system",
    [pytest.param(system, marks=() if system.page == "capuchin" else pytest.mark.slow) for system in SYSTEMS],
    ids=lambda system: system.page,
)
def test_the_commands_of_a_systems_page_work(system: Any, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in load("pages").commands_of(system):
        words = shlex.split(command)[1:]
        if words[0] == "run":  # which would take this process over
            done = subprocess.run(
                [sys.executable, "-m", "lowtide", *words], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
        else:
            assert main(words) in (0, 2), capsys.readouterr().err
            said = capsys.readouterr()
            assert "simulated" in said.out or "floor" in said.err, said.err


# ---- inside sentences ----


def spans_of(text: str) -> Iterator[list[str]]:
    for span in re.findall(r"`lowtide ([a-z]+[^`\n]*)`", text):
        yield span.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_in_a_sentence_has_a_verb_and_options_that_exist(page: Path) -> None:
    context = click.Context(group)
    for verb, *words in spans_of(page.read_text()):
        assert verb in VERBS, f"`lowtide {verb}` in {page.name}"
        command = group.get_command(context, verb)
        assert command is not None
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            if not word.startswith("-"):
                continue
            assert word.partition("=")[0] in options, f"`lowtide {verb} {word}` in {page.name}"


def test_every_verb_is_in_the_readme() -> None:
    named = {words[0] for words in spans_of((ROOT / "README.md").read_text())}
    assert set(VERBS) <= named
