"""The planner's side of the house imports no torch: its tests run in milliseconds, and its commands start at once."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import lowtide.codecs
import lowtide.core
import lowtide.estimate
import lowtide.plan
import lowtide.report
import lowtide.residency
import lowtide.simulate

PURE_PACKAGES = (
    lowtide.codecs,
    lowtide.core,
    lowtide.estimate,
    lowtide.plan,
    lowtide.report,
    lowtide.residency,
    lowtide.simulate,
)
PURE_MODULES = (
    "lowtide",
    "lowtide.errors",
    "lowtide.registry",
    "lowtide.capture.builder",
    "lowtide.capture.dtr",
    "lowtide.cli",
    "lowtide.execute.step.matcher",
    "lowtide.memory.budget",
    "lowtide.testing.codecs",
    "lowtide.testing.stores",
    "lowtide.tiers",
)


def test_the_planner_and_the_residency_machine_import_no_torch() -> None:
    names = [
        module.name
        for package in PURE_PACKAGES
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    assert len(names) > 15
    code = (
        f"import importlib, sys\nfor name in {[*PURE_MODULES, *names]!r}:\n"
        "    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
