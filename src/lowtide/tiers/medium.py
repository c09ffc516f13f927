"""What a tier is made of: a place where bytes live at offsets, with blocking operations."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

ALIGN_BYTES = 4096
"""Offsets are multiples of this: what O_DIRECT needs on every common disk, and a page of memory."""


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

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`."""

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill all of `into` from `offset`."""

    def close(self) -> None:
        """Release everything, on disk too."""


def figures_of(medium: Medium) -> dict[str, object]:
    """Return what a medium counts by itself, ready for a logger: most count nothing."""
    figures: dict[str, object] = getattr(medium, "figures", dict)()
    return figures
