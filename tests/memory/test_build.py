"""Building the native part: what is said meanwhile, and why it could not be done where it could not."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide import compiled as building
from lowtide.errors import NativeUnavailable
from lowtide.memory import native
from lowtide.memory.native.library import CORE, NATIVE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native part is for Linux")

SAID = "lowtide: building the native part, once (about 35 s)\n"
MAKES_IT = 'while [ "$1" != -o ]; do shift; done; : > "$2"'

Compiler = Callable[[str], None]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "_announced", set())
    monkeypatch.setattr(building, "_quiet", False)
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """Put a shell script in the place of the compiler."""

    def put(script: str) -> None:
        path = tmp_path / "fake-g++"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return put


def build(version: str = "2.13.0") -> Path:
    return building.build(NATIVE, torch(version))


def torch(version: str) -> building.Torch:
    return building.Torch(directory=Path("/torch"), version=version, cxx11_abi=True)


def refused() -> str:
    with pytest.raises(NativeUnavailable) as caught:
        build()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_build_says_once_what_takes_so_long_and_the_cache_says_nothing(
    compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(MAKES_IT)
    made = build()
    assert made.exists()
    assert capsys.readouterr().err == SAID
    assert build() == made
    assert capsys.readouterr().err == ""
    assert build("2.14.0") != made
    assert capsys.readouterr().err == "", "once for each process"


def test_what_is_in_the_cache_is_used_without_a_word(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    target = building.library_path(NATIVE, torch("2.13.0"))
    for path in (target, building.library_path(CORE)):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    compiler("exit 1")
    assert build() == target
    assert capsys.readouterr().err == ""


def test_whoever_asked_for_silence_gets_it(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(MAKES_IT)
    native.build_quietly()
    assert build().exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("said", "way_out"),
    [
        ("lowtide.h:3:10: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("g++: error: unrecognized command line option '-std=c++20'", "g++ 10 or later"),
        ("/tmp/cc.s: fatal error: error writing: No space left on device", "TMPDIR"),
        ("budget.cpp:7:1: error: 'mremap' was not declared", "another compiler in CXX"),
    ],
)
def test_a_failed_compiler_is_quoted_with_what_helps(compiler: Compiler, said: str, way_out: str) -> None:
    compiler(f"echo 'In file included from here:' >&2; echo {shlex.quote(said)} >&2; exit 1")
    message = refused()
    assert f"could not build the native part ({said})" in message
    assert way_out in message
    assert "install g++ (Debian" not in message


def test_a_compiler_that_says_nothing_is_not_believed(compiler: Compiler) -> None:
    compiler("exit 0")
    assert "said that it built the native part, but did not" in refused()


def test_a_missing_compiler_is_told_apart_from_a_wrong_name_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler found: install g++" in refused()
    monkeypatch.setenv("CXX", "g+++")
    message = refused()
    assert "CXX names g+++" in message
    assert "install g++" not in message
    assert capsys.readouterr().err == "", "nothing was built"


def test_a_cache_that_cannot_be_written_is_the_reason_and_not_the_compiler(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(MAKES_IT)
    (tmp_path / "file").write_text("")
    # A file where a directory belongs refuses also root, to whom permissions mean nothing.
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "file"))
    message = refused()
    assert f"cannot be built into {tmp_path / 'file'}" in message
    assert "LOWTIDE_CACHE" in message
    assert "g++" not in message
    assert capsys.readouterr().err == ""


def test_a_compiler_that_cannot_be_run_is_the_reason_and_not_the_cache(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler(MAKES_IT)
    (tmp_path / "fake-g++").write_bytes(b"\x7fELF nonsense")
    message = refused()
    assert "fake-g++ cannot be run (Exec format error)" in message
    assert "LOWTIDE_CACHE" not in message


def test_a_build_that_failed_is_not_tried_again_in_the_same_process(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler(f"echo tried >> {shlex.quote(str(tmp_path / 'log'))}; echo 'error: no' >&2; exit 1")
    native._tried.cache_clear()
    try:
        messages = set()
        for _ in range(3):
            with pytest.raises(NativeUnavailable) as caught:
                native.load()
            messages.add(str(caught.value))
    finally:
        native._tried.cache_clear()
    assert len(messages) == 1
    assert (tmp_path / "log").read_text() == "tried\n"


def test_a_library_that_does_not_load_says_where_it_is(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler(MAKES_IT)
    native._tried.cache_clear()
    try:
        with pytest.raises(NativeUnavailable, match=r"liblowtide_torch.so cannot be loaded .*: remove it"):
            native.load()
    finally:
        native._tried.cache_clear()


def test_a_library_that_others_could_have_written_is_built_anew(compiler: Compiler) -> None:
    compiler(MAKES_IT)
    target = build()
    target.write_bytes(b"planted")
    target.chmod(0o777)
    assert build() == target
    assert target.read_bytes() != b"planted"
    assert target.stat().st_mode & 0o022 == 0


def test_a_directory_of_another_user_is_refused_and_one_that_is_open_is_closed(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(MAKES_IT)
    target = build()
    target.parent.chmod(0o777)
    build()
    assert target.parent.stat().st_mode & 0o022 == 0
    own = target.parent.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: own + 1)
    if own == 0:
        os.chown(target.parent, 12345, -1)
    assert "belongs to another user" in refused()


def test_one_core_serves_all_versions_of_torch_but_not_both_layouts_of_strings(
    compiler: Compiler, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    compiler(f"echo >> {shlex.quote(str(log))}; {MAKES_IT}")
    for version, expected in (("2.13.0", 2), ("2.14.0", 3)):
        build(version)
        assert len(log.read_text().splitlines()) == expected
    old = building.Torch(directory=Path("/torch"), version="2.6.0", cxx11_abi=False)
    building.build(NATIVE, old)
    assert len(log.read_text().splitlines()) == 5
