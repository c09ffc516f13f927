"""Compiles every library that a wheel carries, inside the root that wheel.py makes.

python libraries.py OUT TORCHES [BASELINE]
    OUT       where they go, laid out as `lowtide.compiled` looks for them
    TORCHES   a directory a version of torch, such as 2.13.0, with its `include`
    BASELINE  the root of an older system, whose C and C++ libraries they are linked with
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lowtide import compiled
from lowtide.compiled import SHIPPED_MINORS, Library, Torch, compile_library, compiler, shipped_name

HERE = Path(__file__).parent
PACKAGE = Path(compiled.__file__).parent


def declared(file: str) -> dict[str, Library]:
    """Return the libraries that a file of the package declares; without its package, which needs numpy or torch."""
    return {name: each for name, each in runpy.run_path(str(PACKAGE / file)).items() if isinstance(each, Library)}


NATIVE = declared("memory/native/library.py")["NATIVE"]
OBSERVER = declared("execute/observe/library.py")["OBSERVER"]
SMALL = [
    each
    for part in ("codecs/library.py", "paging/library.py", "tiers/resp_engine.py")
    for each in declared(part).values()
]
LIBRARY_DIRECTORY = "usr/lib/x86_64-linux-gnu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    library: Library
    torch: Torch | None
    cxx11_abi: bool

    @property
    def name(self) -> Path:
        found = shipped_name(self.library, self.torch, cxx11_abi=self.cxx11_abi)
        assert found is not None, f"{self.torch} is no release"
        return found

    @property
    def title(self) -> str:
        layout = "" if self.cxx11_abi else ", old strings"
        return f"{self.library.name} for {f'torch {self.torch.version}' if self.torch else 'every torch'}{layout}"


def torches(directory: Path) -> Iterator[Torch]:
    for path in sorted(directory.iterdir(), key=lambda path: tuple(map(int, path.name.split(".")))):
        # PyPI's torch 2.6 has the old layout of strings, other builds of it the new one; later ones have only the new.
        for cxx11_abi in (True, False) if path.name.startswith("2.6.") else (True,):
            yield Torch(directory=path, version=path.name, cxx11_abi=cxx11_abi)


def jobs(directory: Path) -> tuple[list[Job], list[Job]]:
    """Return what uses no torch, and what is linked with that."""
    found = list(torches(directory))
    layouts = {torch.cxx11_abi for torch in found}
    assert NATIVE.core is not None
    first = [Job(library=NATIVE.core, torch=None, cxx11_abi=abi) for abi in layouts]
    first += [Job(library=each, torch=None, cxx11_abi=True) for each in SMALL]
    return first, [
        Job(library=each, torch=torch, cxx11_abi=torch.cxx11_abi) for torch in found for each in (NATIVE, OBSERVER)
    ]


def stand_ins(directory: Path, cxx: str) -> list[str]:
    """Make empty libraries with the names of torch's: when ours are loaded, the real ones are there."""
    for name in ("c10", "torch_cpu", "torch_python"):
        path = directory / f"lib{name}.so"
        subprocess.run(
            [cxx, "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-x", "c++", "/dev/null", "-o", path], check=True
        )
    return [f"-L{directory}", "-Wl,--no-as-needed"]


def baseline_flags(baseline: Path) -> list[str]:
    """Compile for an older C library, and with its C++ library instead of the compiler's own."""
    for path in baseline.rglob("*"):
        # Links from the top would lead out of it.
        if path.is_symlink() and (target := path.readlink()).is_absolute():
            path.unlink()
            path.symlink_to(os.path.relpath(baseline / target.relative_to("/"), path.parent))
    # A part of Python's headers that its other headers look for among the system's.
    configuration = Path("usr/include/x86_64-linux-gnu") / Path(sysconfig.get_paths()["include"]).name
    if ("/" / configuration).is_dir():
        shutil.copytree("/" / configuration, baseline / configuration, dirs_exist_ok=True)
    libraries = baseline / LIBRARY_DIRECTORY
    cxx_library = libraries / "libstdc++.so"
    if not cxx_library.exists():
        cxx_library.symlink_to("libstdc++.so.6")
    return [
        f"--sysroot={baseline}",
        f"-L{libraries}",
        f"-L{baseline / 'lib/x86_64-linux-gnu'}",
        "-include",
        str(HERE / "baseline.h"),
    ]


def make(job: Job, out: Path, cxx: str, flags: list[str]) -> None:
    made = out / job.name
    made.parent.mkdir(parents=True, exist_ok=True)
    links = []
    if job.library.core is not None:
        core = shipped_name(job.library.core, cxx11_abi=job.cxx11_abi)
        assert core is not None
        links = [str(out / core), f"-Wl,-rpath,$ORIGIN/../{core.parent}"]
    compile_library(job.library, cxx, made, job.torch, cxx11_abi=job.cxx11_abi, flags=flags, links=links)
    (made.parent / "unit.cpp").unlink()
    subprocess.run(["strip", "--strip-unneeded", made], check=True)
    print(job.title, flush=True)


def main() -> None:
    out, directory = Path(sys.argv[1]), Path(sys.argv[2])
    cxx = compiler()
    assert cxx is not None, "no compiler"
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        flags = stand_ins(Path(scratch), cxx)
        if sys.argv[3:]:
            flags += baseline_flags(Path(sys.argv[3]))
        for stage in jobs(directory):
            trials = {job: pool.submit(make, job, out, cxx, flags) for job in stage}
            failed = [f"{job.title}: {error}" for job, trial in trials.items() if (error := trial.exception())]
            if failed:
                raise SystemExit("\n".join(failed))
    minors = dict.fromkeys(torch.released_minor for torch in torches(directory))
    (out / SHIPPED_MINORS).write_text(" ".join(filter(None, minors)) + "\n")


if __name__ == "__main__":
    main()
