"""Native libraries: those that a wheel carries, or else built with one g++ call into a cache.

Note [Shipped libraries]: a wheel has the libraries that use no torch once, and the others once for each minor version
of torch, which keeps its binary interface; all of them use Python's stable interface. They are loaded from the
package's own directory and from nowhere else: anyone who can write there can change the Python code too. One that was
made from other sources is not found, for its directory is named by their hash. Where none fits (a newer torch, one
that was built from its sources, another processor) the library is built from the sources, which the wheel has too.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lowtide.errors import NativeUnavailable

T = TypeVar("T")

_SHIPPED = Path(__file__).parent / "shipped"
# A file there: the minor versions of torch, which the names of directories do not tell.
SHIPPED_MINORS = "torches.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A shared library of this package: `name` is its file's, `title` what messages call it.

    `build_s` is what building it takes, roughly, on one core of a small machine. `links`: libraries of torch's beside
    those that all are linked with. `core`: one that uses no torch, which this one is linked with and loaded with; both
    have one title, and `build_s` of both together.
    """

    name: str
    title: str
    build_s: int
    directory: Path
    sources: tuple[str, ...]
    headers: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    core: Library | None = None
    flags: tuple[str, ...] = ("-O2",)


# Words of a failed compiler, and what helps; the first that fits is said.
_REMEDIES = (
    ("Python.h", "install Python's headers (Debian: apt-get install python3-dev)"),
    ("-std=c++20", "install a compiler that knows C++20, such as g++ 10 or later, or name one in CXX"),
    ("C++20 or later", "install g++ 11 or later, which this torch needs, or name another compiler in CXX"),
    ("No space left", "free some space in the temporary directory, or set TMPDIR to another one"),
)
_OTHER_REMEDY = "install g++ 10 or later, or name another compiler in CXX"

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_announced: set[str] = set()
_quiet = False


def build_quietly() -> None:
    """Build without messages from here on."""
    global _quiet
    _quiet = True


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The torch that a library is built for."""

    directory: Path
    version: str
    cxx11_abi: bool

    @classmethod
    def here(cls) -> Torch:
        """Return the one that is installed, which is imported for that."""
        import torch

        return cls(
            directory=Path(torch.__file__).parent,
            version=torch.__version__,
            cxx11_abi=torch.compiled_with_cxx11_abi(),
        )

    @property
    def released_minor(self) -> str | None:
        """Its minor version, such as "2.13"; None: it is not a release, and its binary interface is unknown."""
        found = re.fullmatch(r"(\d+\.\d+)\.\d+(\+\w+)?", self.version)
        return found[1] if found else None


# A core is one for all versions of torch, but not for both ways in which C++ lays out its strings: it shares them.


def library_path(library: Library, torch: Torch | None = None, *, cxx11_abi: bool = True) -> Path:
    """Return where a library for this Python, torch and source belongs in the cache."""
    made_for = f"torch {torch.version} {torch.cxx11_abi}" if torch else f"no torch {cxx11_abi}"
    made_for += f" {sys.implementation.cache_tag} {sysconfig.get_platform()}"
    if library.core and torch:
        core = library.core
        made_for += str(shipped_path(core, cxx11_abi=torch.cxx11_abi) or library_path(core, cxx11_abi=torch.cxx11_abi))
    return cache_dir() / "native" / _digest(library, made_for) / library.name


def shipped_name(library: Library, torch: Torch | None = None, *, cxx11_abi: bool = True) -> Path | None:
    """Return where a library is below the directory of shipped ones, or None: none can fit."""
    made_for = f"no torch {cxx11_abi}"
    if torch is not None:
        if torch.released_minor is None:
            return None
        made_for = f"torch {torch.released_minor} {torch.cxx11_abi}"
    return Path(_digest(library, f"{made_for} {platform.machine()}")) / library.name


def shipped_path(library: Library, torch: Torch | None = None, *, cxx11_abi: bool = True) -> Path | None:
    """Return the library that the package came with, if one fits; see Note [Shipped libraries]."""
    if not _SHIPPED.is_dir() or not STABLE_PYTHON:
        return None
    name = shipped_name(library, torch, cxx11_abi=cxx11_abi)
    return _SHIPPED / name if name and (_SHIPPED / name).is_file() else None


def shipped_minors() -> list[str]:
    """Return the minor versions of torch that the package came with libraries for."""
    listed = _SHIPPED / SHIPPED_MINORS
    return listed.read_text().split() if listed.is_file() else []


def is_shipped(path: Path) -> bool:
    """Tell whether the package came with a library."""
    return path.is_relative_to(_SHIPPED)


def loaded(library: Library, opened: Callable[[Path], T], torch: Torch | None = None) -> T:
    """Return what `opened` makes of the library: the shipped one, or one that is built first where need be.

    Raises NativeUnavailable with the reason.
    """
    shipped, refused = shipped_path(library, torch), ""
    if shipped:
        try:
            return opened(shipped)
        except (OSError, AttributeError) as error:
            refused = f"{shipped} cannot be loaded ({error}); "
    try:
        path = build(library, torch)
    except NativeUnavailable as error:
        raise NativeUnavailable(f"{refused}{error}") from error
    try:
        return opened(path)
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} cannot be loaded ({error}): remove it to rebuild it") from error


def _digest(library: Library, made_for: str) -> str:
    digest = hashlib.sha256()
    for path in (*(library.directory / name for name in (*library.sources, *library.headers)), Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(made_for.encode())
    return digest.hexdigest()[:16]


def build(library: Library, torch: Torch | None = None, *, cxx11_abi: bool = True) -> Path:
    """Return the built library, building it first where it is not in the cache yet."""
    core = None
    if library.core and torch:
        core = shipped_path(library.core, cxx11_abi=torch.cxx11_abi) or build(library.core, cxx11_abi=torch.cxx11_abi)
    target = library_path(library, torch, cxx11_abi=cxx11_abi)
    _secure(target.parent.parent, library)
    _secure(target.parent, library)
    if _is_ours_alone(target):
        return target
    if sys.platform != "linux":
        raise NativeUnavailable(f"{library.title} needs Linux (mremap), this is {sys.platform}: train on Linux")
    cxx = compiler()
    if cxx is None:
        raise NativeUnavailable(_no_compiler(library, torch))
    try:
        target.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        target.parent.mkdir(exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            _announce(library)
            links = [] if core is None else [str(core), f"-Wl,-rpath,{core.parent}"]
            compile_library(library, cxx, made, torch, cxx11_abi=cxx11_abi, links=links)
            made.chmod(0o755)
            made.replace(target)  # atomically, even if another process builds it now
    except OSError as error:
        raise NativeUnavailable(
            f"{library.title} cannot be built into {target.parent} ({error.strerror or error}): "
            "make that writable, or set LOWTIDE_CACHE to a directory that is"
        ) from error
    return target


# Note [Whose library]: what is loaded runs with this user's rights. So it has to be this user's or root's file, which
# no other user can write, in directories of which the same is true: a cache may be shared, as /tmp is.


def _is_ours_alone(path: Path) -> bool:
    """Tell whether a file is there that no other user can have made or changed; see Note [Whose library]."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS_WRITE


def _secure(directory: Path, library: Library) -> None:
    """Refuse a directory of another user's, and close one of our own that others can write to."""
    try:
        found = directory.lstat()
    except OSError:
        return  # nothing can be loaded from there; the build will say why not
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()):
        raise NativeUnavailable(
            f"{library.title} is not loaded from {directory}, which belongs to another user: remove it, or set "
            "LOWTIDE_CACHE to a directory of your own"
        )
    if found.st_mode & _OTHERS_WRITE and found.st_uid == os.geteuid():
        directory.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)


def _no_compiler(library: Library, torch: Torch | None) -> str:
    if stated := os.environ.get("CXX"):
        return f"no C++ compiler found: CXX names {stated}, which does not exist: correct it, or unset it to use g++"
    remedy = "install g++ (Debian: apt-get install g++), or name a compiler in CXX"
    if torch is None or not _SHIPPED.is_dir() or shipped_path(library, torch):
        return f"no C++ compiler found: {remedy}"
    python = "" if STABLE_PYTHON else " and a Python without the GIL"
    return (
        f"the package has no library for torch {torch.version}{python}, and no C++ compiler was found to build one: "
        f"{remedy}, or install one of the versions of torch that it has libraries for ({', '.join(shipped_minors())})"
    )


def _announce(library: Library) -> None:
    """Say why nothing happens for a while, once for each library and its core."""
    if _quiet or library.title in _announced:
        return
    _announced.add(library.title)
    sys.stderr.write(f"lowtide: building {library.title}, once (about {library.build_s} s)\n")
    sys.stderr.flush()


def _as_one_unit(library: Library, scratch: Path) -> Path:
    """Return a source that includes them all: torch's headers, which take most of the time, are read once.

    They come first: after a source's `using namespace` some of their names would mean two things.
    """
    texts = [(library.directory / name).read_text() for name in (*library.sources, *library.headers)]
    torch_headers = sorted({line for text in texts for line in text.splitlines() if line.startswith(_TORCH_INCLUDES)})
    unit = scratch / "unit.cpp"
    # Some are not in every version: code that includes them checks first.
    first = (f"#if __has_include({line.split()[1]})\n{line}\n#endif" for line in torch_headers)
    unit.write_text("\n".join([*first, *(f'#include "{name}"' for name in library.sources), ""]))
    return unit


_TORCH_INCLUDES = tuple(f"#include <{part}/" for part in ("ATen", "c10", "torch"))


# The interface that every CPython from 3.11 on has; where there is no GIL there is none.
STABLE_PYTHON = () if sysconfig.get_config_var("Py_GIL_DISABLED") else ("-DPy_LIMITED_API=0x030b0000",)


def compile_library(
    library: Library,
    cxx: str,
    made: Path,
    torch: Torch | None = None,
    *,
    cxx11_abi: bool = True,
    flags: Sequence[str] = (),
    links: Sequence[str] = (),
) -> None:
    """Make a library, whatever is in the cache; `cxx11_abi`: of one that uses no torch."""
    linked = [] if torch is None else [f"-L{torch.directory / 'lib'}", "-lc10", "-ltorch_cpu"]
    command = [
        cxx,
        "-std=c++20",
        *library.flags,
        *flags,
        "-DNDEBUG",  # torch is built so, and some of its classes have other members without it
        "-fPIC",
        "-shared",
        "-pthread",
        f"-Wl,-soname,{library.name}",
        "-Wl,-z,now",  # a fault's handler calls functions that were never called before
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi if torch else cxx11_abi)}",
        *STABLE_PYTHON,
        *([] if torch is None else [f"-isystem{torch.directory / 'include'}"]),
        f"-isystem{sysconfig.get_paths()['include']}",
        f"-I{library.directory}",
        str(_as_one_unit(library, made.parent)),
        "-o",
        str(made),
        *linked,
        *(f"-l{name}" for name in library.links),
        *links,
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NativeUnavailable(
            f"{cxx} cannot be run ({error.strerror or error}): correct CXX, or unset it to use g++"
        ) from error
    if run.returncode != 0:
        errors = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
        first = errors[0] if errors else f"exit code {run.returncode}"
        remedy = next((remedy for words, remedy in _REMEDIES if words in first), _OTHER_REMEDY)
        raise NativeUnavailable(f"{Path(cxx).name} could not build {library.title} ({first.strip()}): {remedy}")
    if not made.exists():
        raise NativeUnavailable(f"{Path(cxx).name} said that it built {library.title}, but did not: {_OTHER_REMEDY}")
