"""The library below the one that knows torch: it is built once, for every torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

from lowtide.memory import native
from lowtide.memory.native.library import CORE


def loaded_core() -> Path:
    native.load()
    maps = Path("/proc/self/maps").read_text()
    (path,) = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.endswith(f"/{CORE.name}")}
    return Path(path)


def said_by(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_core_uses_nothing_of_torch() -> None:
    core = str(loaded_core())
    names = [line.split(maxsplit=2)[-1] for line in said_by("nm", "-DC", core).splitlines()]
    assert any("lowtide::Ranges" in name for name in names)
    assert not [name for name in names if any(part in name for part in ("c10::", "at::", "torch::", "caffe2::"))]
    needed = [line for line in said_by("objdump", "-p", core).splitlines() if "NEEDED" in line]
    assert needed
    assert not [line for line in needed if "torch" in line or "c10" in line]
