"""The native part as libraries to build; see Note [Two libraries] in lowtide.h."""

from __future__ import annotations

from pathlib import Path

from lowtide.compiled import Library

_HERE = Path(__file__).parent
_TITLE = "the native part"
_BUILD_S = 35

_CORE_HEADERS = (
    "call.h",
    "checksum.h",
    "coder.h",
    "excerpt.h",
    "lowtide.h",
    "meter.h",
    "mover.h",
    "neighbourhoods.h",
    "pages.h",
    "range.h",
    "ranges.h",
    "read_ahead.h",
    "remakes.h",
    "runs.h",
    "schedule.h",
    "slow.h",
    "source.h",
    "tier.h",
    "updates.h",
)

CORE = Library(
    name="liblowtide.so",
    title=_TITLE,
    build_s=_BUILD_S,
    directory=_HERE,
    sources=("budget.cpp", "faults.cpp", "ranges.cpp", "read_ahead.cpp", "remakes.cpp", "schedule.cpp", "tide.cpp"),
    headers=_CORE_HEADERS,
)

NATIVE = Library(
    name="liblowtide_torch.so",
    title=_TITLE,
    build_s=_BUILD_S,
    directory=_HERE,
    sources=("allocator.cpp", "calls.cpp", "observe.cpp", "reruns.cpp", "tensors.cpp", "updates.cpp"),
    headers=("calls.h", *_CORE_HEADERS),
    core=CORE,
)
