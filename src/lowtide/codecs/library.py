"""The native functions of codecs as a library to build."""

from __future__ import annotations

from pathlib import Path

from lowtide.compiled import Library

CODECS = Library(
    name="liblowtide_codecs.so",
    title="the codecs",
    build_s=3,
    directory=Path(__file__).parent / "native",
    sources=("codecs.cpp",),
    # Nobody looks at the flags of floating point: else loops with a choice between two sums would not be vectors.
    flags=("-O3", "-fno-trapping-math"),
)
