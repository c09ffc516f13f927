"""The observer of operators as a library to build."""

from __future__ import annotations

from pathlib import Path

from lowtide.compiled import Library

OBSERVER = Library(
    name="liblowtide_observer.so",
    title="the observer of operators",
    build_s=15,
    directory=Path(__file__).parent / "native",
    sources=("observer.cpp", "touches.cpp"),
    headers=("telling.h",),
    links=("torch_python",),
)
