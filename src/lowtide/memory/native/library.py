"""The native part as a library to build."""

from __future__ import annotations

from pathlib import Path

from lowtide.compiled import Library

NATIVE = Library(
    name="liblowtide.so",
    title="the native part",
    build_s=20,
    directory=Path(__file__).parent,
    sources=(
        "budget.cpp",
        "calls.cpp",
        "faults.cpp",
        "observe.cpp",
        "ranges.cpp",
        "remakes.cpp",
        "schedule.cpp",
        "tide.cpp",
    ),
    headers=(
        "calls.h",
        "checksum.h",
        "coder.h",
        "lowtide.h",
        "meter.h",
        "neighbourhoods.h",
        "pages.h",
        "range.h",
        "ranges.h",
        "remakes.h",
        "runs.h",
        "schedule.h",
        "slow.h",
        "source.h",
        "tier.h",
    ),
)
