"""The tag of a wheel is that of the oldest system that it runs on; libraries that need a newer one are refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOP = Path(__file__).parents[2]
HAS = "GLIBCXX_3.4.9 _ZSt1a\nGLIBCXX_3.4.28 _ZSt1b\nCXXABI_1.3.12 c\n"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return wheel.py with a root whose baseline has glibc 2.31."""
    spec = importlib.util.spec_from_file_location("wheel_script", TOP / "release" / "wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    libraries = tmp_path / "baseline" / "lib" / "x86_64-linux-gnu"
    libraries.mkdir(parents=True)
    (libraries / "libc-2.31.so").touch()
    (libraries / "libc.so.6").symlink_to("libc-2.31.so")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x.so").touch()
    return module


def tag(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch, wanted: str) -> str:
    monkeypatch.setattr(wheel, "said_by", lambda *command: wanted if command[-1].name == "x.so" else HAS)
    found = wheel.platform_tag(wheel.ROOT / "out")
    assert isinstance(found, str)
    return found


def test_what_the_baseline_has_may_be_needed(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = """
0000  DF *UND*  0000  GLIBC_2.31  f
0000  DF *UND*  0000  GLIBCXX_3.4.28  _ZSt1b
0000  DF *UND*  0000  (CXXABI_1.3.9) c
0000  D  *UND*  0000              _ZN3c105ErrorE
0000 g DF .text  0000  GLIBC_2.99  defined_here
"""
    assert tag(wheel, monkeypatch, wanted) == "manylinux_2_31_x86_64"


@pytest.mark.parametrize(
    "wanted",
    ["0000 DF *UND* 0000 GLIBC_2.32 f", "0000 DF *UND* 0000 GLIBCXX_3.4.29 f", "0000 DF *UND* 0000 (CXXABI_1.3.13) f"],
)
def test_newer_symbols_are_refused(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    with pytest.raises(SystemExit, match="bullseye has"):
        tag(wheel, monkeypatch, wanted)


def test_a_function_of_a_newer_c_plus_plus_library_is_refused(
    wheel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="which bullseye does not have"):
        tag(wheel, monkeypatch, "0000  D  *UND*  0000   _ZSt28__throw_bad_array_new_lengthv")
