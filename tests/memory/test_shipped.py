"""Libraries that the package comes with: which one is taken, and what is done where none fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide import compiled
from lowtide.compiled import (
    SHIPPED_MINORS,
    Library,
    Torch,
    build,
    is_shipped,
    loaded,
    shipped_name,
    shipped_path,
)
from lowtide.errors import NativeUnavailable
from lowtide.execute.observe.library import OBSERVER
from lowtide.memory.native.library import CORE, NATIVE

TORCH = Torch(directory=Path("/torch"), version="2.13.0", cxx11_abi=True)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have an empty directory of shipped libraries, an empty cache and no compiler."""
    directory = tmp_path / "shipped"
    directory.mkdir()
    monkeypatch.setattr(compiled, "_SHIPPED", directory)
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return directory


def ship(package: Path, library: Library = NATIVE, torch: Torch | None = TORCH) -> Path:
    name = shipped_name(library, torch)
    assert name is not None
    path = package / name
    path.parent.mkdir()
    path.write_bytes(b"")
    return path


def of(version: str, *, cxx11_abi: bool = True) -> Path | None:
    return shipped_path(NATIVE, Torch(directory=Path("/torch"), version=version, cxx11_abi=cxx11_abi))


def test_a_library_fits_every_release_of_its_minor_version_and_no_other(package: Path) -> None:
    path = ship(package)
    assert of("2.13.0") == of("2.13.1") == of("2.13.0+cpu") == of("2.13.0+cu130") == path
    assert of("2.12.0") is None
    assert of("2.1.3") is None
    assert of("2.13.0", cxx11_abi=False) is None
    for no_release in ("2.13.0.dev20260101", "2.13.0a0+git1234567", "2.13.0rc1"):
        assert of(no_release) is None


def test_a_library_made_from_other_sources_is_not_taken(package: Path, tmp_path: Path) -> None:
    source = tmp_path / "x.cpp"
    source.write_text("int x;")
    library = Library(name="x.so", title="x", build_s=1, directory=tmp_path, sources=("x.cpp",))
    path = ship(package, library, None)
    assert shipped_path(library) == path
    source.write_text("int y;")
    assert shipped_path(library) is None


def test_a_python_without_the_gil_is_shipped_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship(package)
    monkeypatch.setattr(compiled, "STABLE_PYTHON", ())
    assert of("2.13.0") is None


def test_a_shipped_library_needs_no_compiler(package: Path) -> None:
    path = ship(package)
    assert loaded(NATIVE, lambda found: found, TORCH) == path
    assert is_shipped(path)


def test_one_that_does_not_load_is_built_instead_or_both_reasons_are_told(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = ship(package)

    def opened(path: Path) -> Path:
        if path == shipped:
            raise OSError("undefined symbol: f")
        return path

    with pytest.raises(NativeUnavailable, match=r"undefined symbol: f\); no C\+\+ compiler found"):
        loaded(NATIVE, opened, TORCH)
    fake = tmp_path / "fake-g++"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; : > "$2"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    built = loaded(NATIVE, opened, TORCH)
    assert built == build(NATIVE, TORCH)
    assert not is_shipped(built)


def test_for_an_unknown_torch_only_its_own_part_is_built_and_linked_with_the_shipped_core(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    core = ship(package, CORE, None)
    fake, log = tmp_path / "fake-g++", tmp_path / "log"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {log}\nwhile [ "$1" != -o ]; do shift; done; : > "$2"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    build(NATIVE, Torch(directory=Path("/torch"), version="2.99.0", cxx11_abi=True))
    (command,) = log.read_text().splitlines()
    assert f" {core} -Wl,-rpath,{core.parent}" in command


def test_without_a_compiler_an_unknown_torch_is_told_in_one_line_what_there_is(package: Path) -> None:
    (package / SHIPPED_MINORS).write_text("2.12 2.13\n")
    unknown = Torch(directory=Path("/torch"), version="2.99.0", cxx11_abi=True)
    with pytest.raises(NativeUnavailable) as told:
        loaded(OBSERVER, lambda path: path, unknown)
    (line,) = str(told.value).splitlines()
    assert line.startswith("the package has no library for torch 2.99.0, and no C++ compiler was found")
    assert "apt-get install g++" in line
    assert line.endswith("(2.12, 2.13)")


def test_a_source_tree_without_a_compiler_does_not_speak_of_libraries_in_the_package(package: Path) -> None:
    package.rmdir()
    with pytest.raises(NativeUnavailable, match=r"^no C\+\+ compiler found: install g\+\+"):
        loaded(OBSERVER, lambda path: path, TORCH)
