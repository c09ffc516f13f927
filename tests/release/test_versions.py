"""The table of tried versions in the docs is the one that was measured, and only good trials count as good."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOP = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def versions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("versions", TOP / "release" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_the_file(versions: ModuleType) -> None:
    assert versions.rows()
    assert versions.PAGE.read_text() == versions.page_with(versions.rows())


def test_only_versions_that_the_wheel_has_libraries_for_are_listed_and_all_of_them_went_well(
    versions: ModuleType,
) -> None:
    pinned = json.loads((TOP / "release" / "torch_headers.json").read_text())
    minors = [version.rpartition(".")[0] for version in pinned]
    for row in versions.rows():
        minor = row["torch"].rpartition(".")[0]
        assert minor in minors
        assert row["native"] == f"shipped, for torch {minor}"
        assert row["fit"] == row["demo"] == versions.GOOD


def test_the_wheel_was_run_with_every_torch_and_every_python_that_it_is_made_for(versions: ModuleType) -> None:
    pinned = json.loads((TOP / "release" / "torch_headers.json").read_text())
    classifiers = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["classifiers"]
    pythons = {found[1] for text in classifiers if (found := re.fullmatch(r".* :: (3\.\d+)", text))}
    assert {version.rpartition(".")[0] for version in pinned} <= {
        row["torch"].rpartition(".")[0] for row in versions.rows()
    }
    assert pythons == {row["python"].rpartition(".")[0] for row in versions.rows()}


def fit(**changed: Any) -> dict[str, Any]:
    good = {"exact": True, "enforced": True, "budget_bytes": 100, "peak_bytes": 99, "swapped_in_bytes": 50}
    return {**good, "operators_put_off": 0, **changed}


@pytest.mark.parametrize(
    "changed", [{"exact": False}, {"enforced": False}, {"peak_bytes": 101}, {"swapped_in_bytes": 0}]
)
def test_a_fit_is_good_only_if_it_is_exact_enforced_and_pressed(versions: ModuleType, changed: dict[str, Any]) -> None:
    late = fit(operators_put_off=3)
    assert versions.fits_said(fit(), late) == versions.GOOD
    assert versions.fits_said(fit(**changed), late).startswith("NOT")
    assert versions.fits_said(fit(), {**late, **changed}).startswith("NOT")
    assert versions.fits_said(fit(), fit()) != versions.GOOD


DEMO = """
                     plain PyTorch  plain, limited  Lowtide, limited
finished                       yes              no               yes
peak of the process        900 MiB         500 MiB           600 MiB
peak of tensors                  -               -           320 MiB
losses identical                 -               -               yes
"""


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("no               yes\npeak of the", "yes              yes\npeak of the"),
        ("320 MiB", "320 MiB *"),
        ("yes\n", "NO\n"),
    ],
)
def test_a_demo_is_good_only_if_it_is_exact_and_enforced(versions: ModuleType, good: str, bad: str) -> None:
    assert versions.demo_said(DEMO) == versions.GOOD
    head, found, tail = DEMO.rpartition(good)
    assert found
    assert versions.demo_said(head + bad + tail).startswith("NOT")


def doctor(compiler: str = "none found") -> list[dict[str, str]]:
    return [
        {"what": "compiler", "detail": compiler},
        {"what": "native part", "detail": "shipped, for torch 2.13 (/somewhere/liblowtide_torch.so)"},
    ]


def test_a_trial_with_a_compiler_or_with_something_built_is_none(versions: ModuleType, tmp_path: Path) -> None:
    assert versions.native_said(doctor(), tmp_path) == "shipped, for torch 2.13"
    with pytest.raises(SystemExit, match=r"/usr/bin/g\+\+ is there"):
        versions.native_said(doctor("/usr/bin/g++"), tmp_path)
    (tmp_path / "native").mkdir()
    with pytest.raises(SystemExit, match="something was built"):
        versions.native_said(doctor(), tmp_path)


def test_rows_are_in_the_order_of_versions_and_newer_ones_replace_older(versions: ModuleType) -> None:
    def row(torch: str, python: str, demo: str = "") -> dict[str, str]:
        return {"torch": torch, "python": python, "demo": demo}

    found: list[dict[str, str]] = []
    for each in (
        row("2.10.0+cu128", "3.9.1"),
        row("2.9.1", "3.12.0"),
        row("2.9.1", "3.9.0"),
        row("2.9.1", "3.12.0", "again"),
    ):
        found = versions.with_row(found, each)
    assert found == [row("2.9.1", "3.9.0"), row("2.9.1", "3.12.0", "again"), row("2.10.0+cu128", "3.9.1")]


def test_the_libraries_are_declared_without_numpy_and_torch() -> None:
    """The root in which they are compiled has neither."""
    code = """
import sys
import tomllib
sys.modules["numpy"] = sys.modules["torch"] = None
sys.path[:0] = sys.argv[1:]
import libraries
print(*(each.name for each in (libraries.NATIVE.core, libraries.NATIVE, libraries.OBSERVER, *libraries.SMALL)))
"""
    command = [sys.executable, "-c", code, TOP / "release", TOP / "src"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    names = ("", "_torch", "_observer", "_codecs", "_pager", "_resp")
    assert said.stdout.split() == [f"liblowtide{name}.so" for name in names]
