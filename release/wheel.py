"""Builds the wheel, which needs no compiler where it is installed: `make wheel`, or

python release/wheel.py --here DIR    for the torch of this environment alone, with this machine's compiler, into DIR

The libraries are compiled in a root of their own (build/wheel/root: Debian 12 with g++, nothing of this machine), for
the C and C++ libraries of Debian 11, against the headers of each minor version of torch. Needs mmdebstrap and the right
to chroot (root, or a user namespace), and the package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
TOP = HERE.parent
WORK = TOP / "build" / "wheel"
ROOT = WORK / "root"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
SYSTEM, SYSTEM_PACKAGES = "bookworm", "g++,python3,python3-dev"
BASELINE, BASELINE_PACKAGES = "bullseye", "libc6-dev,libstdc++6"
SYSTEM_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def make_root(suite: str, packages: str, into: Path) -> None:
    """Unpack packages and all that they depend on; nothing of them is run."""
    if (into / "made").exists():
        return
    shutil.rmtree(into, ignore_errors=True)
    into.parent.mkdir(parents=True, exist_ok=True)
    command = ["mmdebstrap", "--variant=extract", f"--include={packages}", suite, str(into), MIRROR]
    subprocess.run(command, check=True, env={**os.environ, "PATH": SYSTEM_PATH})
    (into / "made").touch()


def compile_libraries() -> Path:
    make_root(SYSTEM, SYSTEM_PACKAGES, ROOT)
    make_root(BASELINE, BASELINE_PACKAGES, ROOT / "baseline")
    import torch_headers  # of this directory

    torch_headers.fetch_all(ROOT / "torches")
    for name in ("src", "release", "out"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    shutil.copytree(TOP / "src", ROOT / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    shutil.copytree(HERE, ROOT / "release")
    alone = [] if os.geteuid() == 0 else [shutil.which("unshare") or "unshare", "--map-root-user"]
    chroot = shutil.which("chroot", path=SYSTEM_PATH) or "chroot"
    script = ["/usr/bin/python3", "/release/libraries.py", "/out", "/torches", "/baseline"]
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/src", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([*alone, chroot, ROOT, *script], check=True, env=variables)
    return ROOT / "out"


def compile_libraries_here(work: Path) -> Path:
    import torch

    torches = work / "torches"
    torches.mkdir(parents=True)
    (torches / torch.__version__.partition("+")[0]).symlink_to(Path(torch.__file__).parent)
    subprocess.run(
        [sys.executable, HERE / "libraries.py", work / "out", torches],
        check=True,
        env={**os.environ, "PYTHONPATH": str(TOP / "src")},
    )
    return work / "out"


def stage(sources: Path, libraries: Path, into: Path) -> Path:
    """Lay out the sources with the libraries that were made from them in the package, and nothing else."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TOP / name, into)
    shutil.copytree(sources, into / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "shipped"))
    shutil.copytree(libraries, into / "src" / "lowtide" / "shipped")
    return into


Version = tuple[int, ...]


def symbol_versions(text: str, library: str) -> Iterator[Version]:
    for found in re.finditer(rf"\b{library}_([0-9]+(?:\.[0-9]+)*)\b", text):
        yield tuple(map(int, found[1].split(".")))


def said_by(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def platform_tag(libraries: Path) -> str:
    """Return the tag of the oldest systems that the libraries run on: the baseline's, if they need nothing newer."""
    c = (ROOT / "baseline/lib/x86_64-linux-gnu/libc.so.6").resolve()
    cxx = ROOT / "baseline/usr/lib/x86_64-linux-gnu/libstdc++.so.6"
    release = tuple(map(int, c.name.removeprefix("libc-").removesuffix(".so").split(".")))
    has = {name: max(symbol_versions(said_by("objdump", "-T", cxx), name)) for name in ("GLIBCXX", "CXXABI")}
    has["GLIBC"] = release
    for path in libraries.rglob("*.so"):
        wanted = [line for line in said_by("objdump", "-T", path).splitlines() if "*UND*" in line]
        for name, most in has.items():
            for version in symbol_versions("\n".join(wanted), name):
                if version > most:
                    raise SystemExit(f"{path} needs {name} {version}, {BASELINE} has {most}")
        # Of the C++ library, and without a version: the baseline's has no such function.
        bare = [line for line in wanted if not re.search(r"\b(GLIBCXX|CXXABI)_[0-9]", line)]
        unknown = [found[0] for line in bare if (found := re.search(r"\b_ZN?K?St\w+$", line))]
        if unknown:
            raise SystemExit(f"{path} needs {', '.join(unknown)}, which {BASELINE} does not have: see baseline.h")
    return "manylinux_" + "_".join(map(str, release)) + "_x86_64"


def pack(staged: Path, platform: str, into: Path) -> Path:
    """Return the wheel: for any CPython from 3.11 on, because the libraries are loaded, not imported."""
    into.mkdir(parents=True, exist_ok=True)
    options = f"--config-settings=--build-option=--python-tag=py311 --plat-name={platform}"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", options, "-w", into, staged]
    subprocess.run(command, check=True)
    (found,) = into.glob(f"lowtide-*-py311-none-{platform}.whl")
    return found


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        into = Path(sys.argv[2])
        with tempfile.TemporaryDirectory() as scratch:
            libraries = compile_libraries_here(Path(scratch) / "work")
            platform = sysconfig.get_platform().replace("-", "_")
            print(pack(stage(TOP / "src", libraries, Path(scratch) / "stage"), platform, into))
        return
    libraries = compile_libraries()
    wheel = pack(stage(ROOT / "src", libraries, WORK / "stage"), platform_tag(libraries), TOP / "dist")
    print(f"{wheel.relative_to(TOP)}, {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
