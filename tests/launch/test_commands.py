"""What `lowtide run` makes of the words after its own options, and of a Python's command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lowtide.errors import BadArgument
from lowtide.launch.escapes import why_not
from lowtide.launch.program import Beside, Here, find_program
from lowtide.launch.python_command import Main, read_command
from lowtide.launch.settings import Settings, leave, reaches, settings_of


@pytest.mark.parametrize(
    ("words", "main", "name", "options", "arguments"),
    [
        (["train.py", "-m", "x"], Main.SCRIPT, "train.py", (), ("-m", "x")),
        (["-u", "-W", "error", "train.py"], Main.SCRIPT, "train.py", ("-u", "-W", "error"), ()),
        (["-X", "dev", "-m", "pkg.train", "--x"], Main.MODULE, "pkg.train", ("-X", "dev"), ("--x",)),
        (["-Bum", "pkg"], Main.MODULE, "pkg", ("-Bu",), ()),
        (["-cprint()", "a"], Main.CODE, "print()", (), ("a",)),
        (["-Wignore", "-"], Main.INPUT, "-", ("-Wignore",), ()),
        ([], Main.INPUT, "-", (), ()),
    ],
)
def test_a_python_command_line_is_read_as_python_reads_it(
    words: list[str], main: Main, name: str, options: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    found = read_command(words)
    assert (found.main, found.name, found.options, found.arguments) == (main, name, options, arguments)


def test_launchers_and_helpers_are_known() -> None:
    assert read_command(["/opt/bin/torchrun", "train.py"]).is_launcher
    assert read_command(["-m", "torch.distributed.run", "train.py"]).is_launcher
    assert read_command(["-m", "torch._inductor.compile_worker"]).is_launcher
    assert not read_command(["-c", "import torch; train()"]).only_loads_a_library


def test_the_probe_of_torchs_compiler_does_not_train() -> None:
    from torch._inductor.cpu_vec_isa import VecISA

    probe = [sys.executable, "-c", VecISA._avx_py_load]
    assert why_not(sys.executable, probe, {}) == ""
    assert "without LOWTIDE_RUN" in why_not(sys.executable, [sys.executable, "-c", "import torch\nprint()"], {})
    assert not read_command(["-m", "torch.distributed.runner", "train.py"]).is_launcher
    assert not read_command(["-c", "torchrun"]).is_launcher
    assert read_command(["-c", "from multiprocessing.spawn import spawn_main; spawn_main()"]).is_multiprocessing


def test_a_script_runs_here_and_a_program_beside(tmp_path: Path) -> None:
    script, shell = tmp_path / "train.py", tmp_path / "train.sh"
    script.write_text("")
    shell.write_text("#!/bin/sh\n")
    shell.chmod(0o755)
    assert find_program(str(script), ["-x"], is_module=False) == Here(program=script, arguments=("-x",))
    assert find_program("pkg.train", ["-x"], is_module=True) == Here(program="pkg.train", arguments=("-x",))
    assert find_program(sys.executable, ["-u", "-m", "pkg"], is_module=False) == Here(program="pkg", arguments=())
    beside = find_program(str(shell), ["-x"], is_module=False)
    assert beside == Beside(command=(str(shell.resolve()), "-x"))
    launcher = ["-m", "torch.distributed.run", "train.py"]
    found = find_program(sys.executable, launcher, is_module=False)
    assert found == Beside(command=(sys.executable, *launcher))
    assert isinstance(find_program(sys.executable, ["-O", "train.py"], is_module=False), Beside), "-O means something"
    with pytest.raises(BadArgument, match="name the script"):
        find_program("python", [], is_module=False)


def test_settings_survive_the_environment() -> None:
    environment = {"PYTHONPATH": "/mine"}
    settings = Settings(budget={"cpu": "2GiB"}, spill=("/a", "/b"), recompute=False, codecs=("zvc",), notes="/n")
    assert not reaches(environment)
    leave(settings, environment)
    leave(settings, environment)
    assert settings_of(environment) == settings
    assert reaches(environment)
    assert environment["PYTHONPATH"].count("site") == 1
    assert environment["PYTHONPATH"].endswith(":/mine")
    assert settings_of({"LOWTIDE_RUN": "{}"}) is None


def test_only_what_may_train_out_of_reach_is_an_escape() -> None:
    environment: dict[str, str] = {}
    leave(Settings(budget="1GiB"), environment)
    assert why_not("/usr/bin/python3", ["python3", "train.py"], environment) == ""
    assert why_not("/bin/ls", ["ls"], {}) == ""
    assert "-I, -E or -S" in why_not(None, ["python3", "-uE", "train.py"], environment)
    assert "without LOWTIDE_RUN" in why_not("torchrun", ["torchrun", "train.py"], {})
