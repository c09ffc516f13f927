"""The wheel, in an environment that has neither a compiler nor the source tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.cli.output import ADVISORY
from lowtide.compiled import STABLE_PYTHON, Torch

TOP = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the native part is for Linux"),
    pytest.mark.skipif(not STABLE_PYTHON, reason="no library is shipped for a Python without the GIL"),
    pytest.mark.skipif(
        Torch.here().released_minor is None, reason="no library is shipped for a torch that is no release"
    ),
]

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Install the wheel into an environment of its own; torch and the other dependencies are those of this one."""
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, TOP / "release" / "wheel.py", "--here", directory], check=True)
    (wheel,) = directory.glob("*.whl")
    environment = directory / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    # A path alone: the links to source trees that are in that directory are not followed.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    home = directory / "home"
    home.mkdir()
    # No other programs are found, so no compiler.
    variables = {"PATH": str(environment / "bin"), "HOME": str(home), "LOWTIDE_CACHE": str(home / "cache")}
    variables |= {name: os.environ[name] for name in ("OMP_NUM_THREADS", "TMPDIR") if name in os.environ}

    def run(*command: str) -> str:
        done = subprocess.run([python, *command], env=variables, cwd=home, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "building" not in done.stderr
        assert not (home / "cache" / "native").exists(), "something was built"
        return done.stdout

    return run


def test_the_package_is_the_wheels_and_every_library_in_it_loads(run: Run) -> None:
    code = """
import json, lowtide
from lowtide.codecs import kernels
from lowtide.compiled import is_shipped
from lowtide.execute.observe import operators, touches
from lowtide.memory import native
from lowtide.paging import library as paging
from lowtide.tiers import resp_engine
kernels.use_portable(False)
touches.can_take_blocks()
paging.load()
resp_engine._library()
shipped = [is_shipped(native.load().path), is_shipped(operators.library_path())]
print(json.dumps([lowtide.__file__, shipped]))
"""
    where, shipped = json.loads(run("-c", code))
    assert not Path(where).is_relative_to(TOP)
    assert shipped == [True, True]


def test_doctor_says_that_the_native_part_is_shipped(run: Run) -> None:
    findings = {finding["what"]: finding for finding in json.loads(run("-m", "lowtide.cli", "doctor", "--json"))}
    assert findings["compiler"]["detail"] == "none found"
    assert findings["compiler"]["verdict"] == "ok"
    assert findings["native part"]["verdict"] == "ok"
    assert findings["native part"]["detail"].startswith(f"shipped, for torch {Torch.here().released_minor}")


def test_the_demo_is_exact_and_its_budget_is_enforced(run: Run) -> None:
    text = run("-m", "lowtide.cli", "demo")
    rows = {line.split("  ")[0].strip(): line.split() for line in text.splitlines()}
    assert rows["losses identical"][-1] == "yes"
    # Plain PyTorch does not finish in what the kernel grants both.
    assert rows["finished"][1:] == ["yes", "no", "yes"]
    assert ADVISORY not in text
    assert "*" not in rows["peak of tensors"]


def test_an_unknown_torch_without_a_compiler_is_told_in_one_line_and_trains_exactly(run: Run) -> None:
    code = """
import json, sys, warnings, torch
torch.__version__ = "2.99.0"
import lowtide

def trained(budget):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def steps():
        for _ in range(3):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if budget is None:
        steps()
        return model.weight.tolist(), None
    with lowtide.fit(model, optimizer, budget=budget) as tide:
        steps()
        return model.weight.tolist(), tide.stats()["budget_exact"]

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    plain, _ = trained(None)
    (once, exact), (twice, _) = trained("1GiB"), trained("1GiB")
print(json.dumps([[str(each.message) for each in told], plain == once == twice, exact]))
"""
    (line,), same, enforced = json.loads(run("-c", code))
    assert line.startswith("lowtide: the package has no library for torch 2.99.0, and no C++ compiler was found")
    assert f"({Torch.here().released_minor})" in line
    assert "the budget is only advisory" in line
    assert len(line.splitlines()) == 1
    assert same
    assert not enforced
