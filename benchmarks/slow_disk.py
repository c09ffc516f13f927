"""A disk that is held to a rate: what plans are worth where the disk is slower than this machine's."""

from __future__ import annotations

from pathlib import Path

from lowtide.tiers import FileMedium, Throttle


class SlowDisk(Throttle):
    """The disk below a directory at `bytes_per_s` each way.

    It is not known again by its directory: what was measured of that one is another disk's rate.
    """

    directories: tuple[Path, ...] = ()

    def __init__(self, directory: Path, *, bytes_per_s: float) -> None:
        super().__init__(FileMedium([directory]), write_bytes_per_s=bytes_per_s, read_bytes_per_s=bytes_per_s)
