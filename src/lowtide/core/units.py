"""Bytes and seconds in, human text out, and back."""

from __future__ import annotations

import re
from fractions import Fraction

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
# Twenty digits are more than any memory; the bound keeps a pasted wall of digits from becoming a huge integer.
_PATTERN = re.compile(r"\s*(-?[0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-zA-Z]*)\s*")
_AMBIGUOUS = {"k", "m", "g", "t"}


def parse_bytes(text: str | int) -> int:
    """Return the bytes that `text` states, such as 4096, "512MiB" or "1.5 GB"; part of a byte is cut off.

    Raises ValueError, in one line, if `text` is neither int nor text, or has no number or no known unit.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(f"cannot read {text!r} as a size: write bytes as an int or a text such as '2GiB'")
    if isinstance(text, int):
        return text
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot read {text!r} as a size: write a number and a unit, such as '2GiB'")
    number, unit = match.groups()
    if unit.lower() in _AMBIGUOUS:
        letter = unit.upper()
        raise ValueError(
            f"unit {unit!r} in {text!r} has two meanings: write {letter}iB (binary) or {letter}B (decimal)"
        )
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        raise ValueError(f"unknown unit {unit!r} in {text!r}: use B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    # A Fraction, because a float would lose the last bytes of sizes beyond 2**53.
    return int(Fraction(number) * factor)


def format_bytes(nbytes: float) -> str:
    """Return `nbytes` with a binary unit and three significant digits."""
    sign = "-" if nbytes < 0 else ""
    value = float(abs(nbytes))
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    index = 0
    # 1023.5 and more would round to "1024", which is one of the next unit.
    while value >= 1023.5 and index < len(units) - 1:
        value /= 1024
        index += 1
    if index == 0:
        return f"{sign}{value:.0f} B"
    return f"{sign}{_three_digits(value)} {units[index]}"


def format_seconds(seconds: float) -> str:
    """Return `seconds` with the unit a reader would choose."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 999.95e-3:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    if seconds < 3597:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def format_rate(bytes_per_s: float) -> str:
    """Return a bandwidth in decimal units, as disks and buses are sold."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_s >= factor:
            return f"{_three_digits(bytes_per_s / factor)} {unit}"
    return f"{_three_digits(bytes_per_s / 1e3)} KB/s"


def _three_digits(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"
