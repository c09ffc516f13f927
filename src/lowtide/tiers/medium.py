"""What a tier is made of: a place where bytes live at offsets, with blocking operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from lowtide.codecs.contract import Codec

ALIGN_BYTES = 4096
"""Offsets are multiples of this: what O_DIRECT needs on every common disk, and a page of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The open files behind a medium, for engines that read and write by descriptor.

    With `direct` they take only block-aligned positions, lengths and memory. Of several files, stripe k of
    `stripe_bytes` lies on file k % n.
    """

    fds: tuple[int, ...]
    stripe_bytes: int
    direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Native functions that move a medium's bytes, for movers that have no business in Python.

    `move(context, write, offset, data, nbytes)` returns 0, an errno or one of the codes below; `alive(context)` whether
    nothing is known against what was written before: both are addresses. `threads` movers have something to gain.
    `explain(code)` says what went wrong last, and what to do.
    """

    move: int
    alive: int
    context: int
    threads: int
    explain: Callable[[int], str]


@runtime_checkable
class Medium(Protocol):
    """Where bytes live. Its operations block, so a store calls them on worker threads, several at once.

    The contract, which `lowtide.testing.stores.MediumTests` checks:

    - Views are contiguous bytes (format 'B'); a view of no bytes is a no-op.
    - Offsets are multiples of `ALIGN_BYTES`; lengths are free. A write may also overwrite the rest of its last block of
      `ALIGN_BYTES`, so extents never share a block.
    - An operation moves all of its bytes or raises `OSError`. Partial transfers are continued inside.
    - Reading past what was ever written is an error ("short read"), unless the medium is lossy.
    - Operations on distinct extents may run at the same time on any thread.
    - `close` is idempotent; after it, operations raise `OSError`. No operation may be running when it is called.

    `PlainMedium` has what most media say of themselves: no files, no engine, no directories, no codecs, no figures.
    """

    @property
    def name(self) -> str:
        """The tier's name in plans, reports and messages."""

    @property
    def capacity_bytes(self) -> int | None:
        """The bytes it may hold (None: no bound is known)."""

    @property
    def lossy(self) -> bool:
        """Whether reads may give other bytes than were written: never true of a tier to train with."""

    @property
    def files(self) -> Files | None:
        """The files to read and write by descriptor (None: bytes pass through `write_at` and `read_at` only)."""

    @property
    def engine(self) -> Engine | None:
        """What moves its bytes natively, where that is not by descriptor (None: nothing does)."""

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where its files are, to tell users and to know the disk again."""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs that bytes pass through."""

    def figures(self) -> dict[str, object]:
        """Return what it counts by itself, ready for a logger."""

    def reset_figures(self) -> None:
        """Count from zero again, after a measurement."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`."""

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill all of `into` from `offset`."""

    def close(self) -> None:
        """Release everything, on disk too."""


@runtime_checkable
class Releases(Protocol):
    """A medium that gives back room that will not be read again: one whose bytes are expensive."""

    def release(self, begin: int, end: int) -> None:
        """Give back what lies from `begin` to `end`."""


class PlainMedium:
    """What a medium says of itself that is bytes at offsets and nothing more: inherit it for a tier of your own."""

    @property
    def files(self) -> Files | None:
        """None: bytes pass through `write_at` and `read_at`."""
        return None

    @property
    def engine(self) -> Engine | None:
        """None: bytes pass through `write_at` and `read_at`."""
        return None

    @property
    def directories(self) -> tuple[Path, ...]:
        """None."""
        return ()

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """None."""
        return ()

    def figures(self) -> dict[str, object]:
        """Return nothing: nothing is counted."""
        return {}

    def reset_figures(self) -> None:
        """Do nothing: nothing is counted."""


def missing_of_medium(found: object) -> list[str]:
    """Return which attributes of a `Medium` something lacks."""
    return [name for name in dir(Medium) if not name.startswith("_") and not hasattr(found, name)]
