"""Files that tensors are read from in place, and that the program writes again.

`torch.save` opens a file of that name and cuts it, with weights in it that nobody else has. So the old file loses its
name first: the new one gets it, and the old bytes stay until the last tensor is gone from them. (safetensors writes
beside the old file, and renames.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_MODULE: Any = torch.serialization


class ReplacedFiles:
    """Replaces how `torch.save` opens files, in the whole process, while it is on.

    `is_source`: whether tensors are in the file of this device and number.
    """

    def __init__(self, is_source: Callable[[tuple[int, int]], bool]) -> None:
        self._is_source = is_source
        self._original: Any = None

    def on(self) -> None:
        """Make way for files that are written from here on."""
        self._original = original = _MODULE._open_zipfile_writer

        def opening(name_or_buffer: Any) -> Any:
            if isinstance(name_or_buffer, str | os.PathLike):
                self._make_way(name_or_buffer)
            return original(name_or_buffer)

        _MODULE._open_zipfile_writer = opening

    def off(self) -> None:
        """Put everything back."""
        _MODULE._open_zipfile_writer = self._original

    def _make_way(self, path: str | os.PathLike[str]) -> None:
        with suppress(OSError):  # there is none, or its folder is not to be changed: the writer says so
            found = os.stat(path)  # noqa: PTH116  # the program's own kind of path
            if self._is_source((found.st_dev, found.st_ino)):
                os.unlink(os.path.realpath(path))  # noqa: PTH108  # a link to it stays
