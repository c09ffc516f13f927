"""What may import what: stages import only those before them, and the planner's side of the house imports no torch.

Without torch its tests run in milliseconds, and its commands start at once.
"""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


# What each package may import of Lowtide besides itself and `lowtide.errors`. Those that are not named may import all.
MAY_IMPORT = {
    "core": set(),
    "autograd": set(),
    "codecs": {"compiled", "core"},
    "plan": {"core"},
    "tiers": {"codecs", "compiled", "core"},
    "memory": {"codecs", "compiled", "core", "tiers"},
    "paging": {"compiled", "core"},
    "estimate": {"core", "tiers"},
    "capture": {"autograd", "core", "estimate"},
    "residency": {"capture", "core", "plan"},
    "simulate": {"core", "estimate", "plan", "residency"},
    "live": {"core"},
    "report": {"core", "estimate", "memory", "plan", "registry", "simulate"},
    "zoo": {"capture", "core"},
    "checkpoint": {"core", "memory"},
    "execute": {
        "autograd",
        "capture",
        "checkpoint",
        "codecs",
        "compiled",
        "core",
        "estimate",
        "live",
        "memory",
        "plan",
        "registry",
        "residency",
        "tiers",
        "zoo",
    },
}
SOURCE = Path(lowtide.__file__).parent


def imported_by(source: str) -> Iterator[str]:
    """Yield the packages of Lowtide that a module imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "lowtide":
                yield rest.partition(".")[0]


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_what_comes_before_it(package: str) -> None:
    modules = sorted((SOURCE / package).rglob("*.py"))
    assert modules
    found = {(str(path.relative_to(SOURCE)), name) for path in modules for name in imported_by(path.read_text())}
    allowed = MAY_IMPORT[package] | {package, "errors"}
    assert {(path, name) for path, name in found if name not in allowed} == set()


@pytest.mark.parametrize(
    "source",
    [
        "import lowtide.execute.step",
        "from lowtide import execute",
        "from lowtide.execute import step",
        "def f():\n    from lowtide.execute.tide.fit import fit",
    ],
)
def test_every_way_to_import_is_seen(source: str) -> None:
    assert list(imported_by(source)) == ["execute"]
