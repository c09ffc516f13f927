"""Builds the native part with one g++ call into a cache, once for each Python, torch and source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from lowtide.errors import NativeUnavailable

SOURCES = ("budget.cpp", "mover.cpp", "observe.cpp")
HEADERS = ("lowtide.h",)


def cache_dir() -> Path:
    """Return where Lowtide keeps what it builds and measures: $LOWTIDE_CACHE, or the user's cache directory."""
    if stated := os.environ.get("LOWTIDE_CACHE"):
        return Path(stated)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lowtide"


def compiler() -> str | None:
    """Return the C++ compiler to use: $CXX, or g++, or c++."""
    stated = os.environ.get("CXX")
    names = (stated,) if stated else ("g++", "c++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def library_path(torch_version: str) -> Path:
    """Return where the library for this Python, torch and source belongs."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS, Path(__file__).name):
        digest.update((here / name).read_bytes())
    digest.update(f"{torch_version} {sys.implementation.cache_tag} {sysconfig.get_platform()}".encode())
    return cache_dir() / "native" / digest.hexdigest()[:16] / "liblowtide.so"


def build(torch_dir: Path, torch_version: str, cxx11_abi: bool) -> Path:
    """Return the built library, building it first where it is not in the cache yet."""
    target = library_path(torch_version)
    if target.exists():
        return target
    if sys.platform != "linux":
        raise NativeUnavailable(f"the native part needs Linux (mremap), this is {sys.platform}")
    cxx = compiler()
    if cxx is None:
        raise NativeUnavailable("no C++ compiler found: install g++ (Debian: apt-get install g++) or set CXX")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            _compile(cxx, made, torch_dir, cxx11_abi)
            made.replace(target)  # whole or not at all, whoever else builds it now
    except OSError as error:
        raise NativeUnavailable(f"cannot build into {target.parent}: {error.strerror}; set LOWTIDE_CACHE") from error
    return target


def _compile(cxx: str, made: Path, torch_dir: Path, cxx11_abi: bool) -> None:
    here = Path(__file__).parent
    command = [
        cxx,
        "-std=c++20",
        "-O2",
        "-DNDEBUG",  # torch is built so, and some of its classes have other members without it
        "-fPIC",
        "-shared",
        "-pthread",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(cxx11_abi)}",
        f"-isystem{torch_dir / 'include'}",
        f"-isystem{sysconfig.get_paths()['include']}",
        *(str(here / name) for name in SOURCES),
        "-o",
        str(made),
        f"-L{torch_dir / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        errors = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
        first = errors[0] if errors else f"exit code {run.returncode}"
        raise NativeUnavailable(f"{Path(cxx).name} could not build the native part: {first}")
