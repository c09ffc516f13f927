"""The words of a tier's errors: what failed, with numbers, and what to change."""

from __future__ import annotations

import errno
import os

from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument, SpillError, SpillFull
from lowtide.tiers.medium import ALIGN_BYTES

# What a native engine answers with beside errnos; the same numbers as in native/resp.cpp and memory/native/tier.h.
SHORT_READ = 10001
REFUSED = 10007
NOT_RESP = 10008
FORGOTTEN = 10009

_LONGEST_ANSWER = 200
# EFBIG is a limit on the size of files (`ulimit -f`): for a spill file it means the same as a full disk.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def spill_error(cause: OSError, *, verb: str, nbytes: int, place: str, free_bytes: int | None = None) -> SpillError:
    """Return the error for an operation of `nbytes` that the system refused with `cause`."""
    number = cause.errno or errno.EIO
    reason = cause.strerror or str(cause) or os.strerror(number)
    text = (
        f"cannot {verb} {format_bytes(nbytes)} ({nbytes} bytes) {'to' if verb == 'write' else 'from'} {place}: {reason}"
    )
    error: SpillError
    if number in _FULL:
        left = "" if free_bytes is None else f" ({format_bytes(free_bytes)} free)"
        error = SpillFull(f"{text}{left}: free space there or spill to another directory")
    else:
        error = SpillError(f"{text}: check that disk, or spill to another directory")
    error.errno = number
    return error


def server_reason(code: int, *, said: str, place: str, timeout_s: float) -> str:
    """Return what went wrong with a server, and what to do; `said` is its answer, where it gave one."""
    said = said if len(said) <= _LONGEST_ANSWER else f"{said[: _LONGEST_ANSWER - 3]}..."
    match code:
        case errno.ENOSPC:
            return f"{place} is out of memory ({said}): raise its maxmemory, or spill to another tier"
        case code if code == REFUSED:
            return f"{place} refused a request: {said}: check the user's rights and the server's settings"
        case code if code == NOT_RESP:
            return f"{place} does not speak RESP (it answered {said!r}): check host and port"
        case code if code == FORGOTTEN:
            return f"{place} was restarted or emptied, so the tensors it held are lost: restart from a checkpoint"
        case code if code == SHORT_READ:
            return f"short read: {place} no longer has all of the bytes: its keys expired or were removed"
        case errno.ETIMEDOUT:
            return f"{place} did not answer within {timeout_s:g} s: check the server, or allow more time with ?timeout="
    return (
        f"{place} cannot be reached ({os.strerror(code)}): tensors that only it holds come back if it restarts with "
        "its data; otherwise restart from a checkpoint"
    )


def server_error(code: int, reason: str, *, verb: str, nbytes: int) -> SpillError:
    """Return the error for an operation of `nbytes` that failed with a server for `reason`."""
    text = f"cannot {verb} {format_bytes(nbytes)} ({nbytes} bytes): {reason}"
    error = SpillFull(text) if code in _FULL else SpillError(text)
    error.errno = code if code < SHORT_READ else errno.EIO
    return error


def short_read(*, got: int, nbytes: int, place: str) -> SpillError:
    """Return the error for a read that met the end of the data."""
    error = SpillError(f"short read: {place} gave {got} of {nbytes} bytes: the spilled data is lost or was cut off")
    error.errno = errno.EIO
    return error


def closed(place: str) -> SpillError:
    """Return the error for using a tier after its close."""
    error = SpillError(f"{place} is closed: open another one")
    error.errno = errno.EBADF
    return error


def other_process(place: str, *, owner_pid: int) -> SpillError:
    """Return the error for using a tier in a forked child."""
    error = SpillError(f"{place} belongs to process {owner_pid}, not to its child {os.getpid()}: open another one here")
    error.errno = errno.EPERM
    return error


def checked_capacity(capacity_bytes: int | None) -> int | None:
    """Return `capacity_bytes` if it can be one."""
    if capacity_bytes is not None and capacity_bytes <= 0:
        raise BadArgument(
            f"capacity of {capacity_bytes} bytes holds nothing: give a positive number, or None for no bound"
        )
    return capacity_bytes


def check_offset(offset: int) -> None:
    """Raise unless a medium may be asked for `offset`."""
    if offset < 0 or offset % ALIGN_BYTES:
        raise BadArgument(f"offset {offset} is not a multiple of {ALIGN_BYTES}: take offsets from Extents")


def check_room(offset: int, nbytes: int, *, capacity_bytes: int | None) -> None:
    """Raise unless `nbytes` at `offset` lie within the capacity."""
    if capacity_bytes is not None and offset + nbytes > capacity_bytes:
        raise SpillFull(
            f"cannot write {nbytes} bytes at {offset}: the spill's capacity is {format_bytes(capacity_bytes)} "
            f"({capacity_bytes} bytes): raise it or swap less"
        )
