"""Steps as JSON lines in a file that several processes may write to."""

from __future__ import annotations

import json
import os
import warnings
from datetime import UTC, datetime
from pathlib import Path

from lowtide.core.step_record import StepRecord
from lowtide.errors import BadArgument


def to_jsonl(path: str | os.PathLike[str], *, rank: int | None = None) -> JsonLines:
    """Return a listener for `tide.on_step` that appends each step to a file, one JSON object a line."""
    return JsonLines(Path(path), rank=rank)


class JsonLines:
    """Appends each step as one line, in one write: the lines of several ranks do not mix.

    A log that cannot be written any more (a full disk) ends with a warning: it is not a reason to end a training.
    """

    def __init__(self, path: Path, *, rank: int | None = None) -> None:
        self._path, self._rank = path, rank
        try:
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BadArgument(f"cannot write the log {path}: {error.strerror}") from error

    def __call__(self, record: StepRecord) -> None:
        """Append a step."""
        if self._descriptor is None:
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"at": at, "pid": os.getpid(), "rank": self._rank, **record.as_json()})
        try:
            os.write(self._descriptor, line.encode() + b"\n")
        except OSError as error:
            self.close()
            warnings.warn(
                f"lowtide: the log {self._path} ends before step {record.step}: {error.strerror}",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the file; later steps are not written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.close()
