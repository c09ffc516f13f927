"""The names that a user may have meant by one that is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_LEAST_ALIKE = 0.6


def is_close(name: str, other: str) -> bool:
    """Tell whether one name may be the other, mistyped."""
    return bool(get_close_matches(name, [other], cutoff=_LEAST_ALIKE))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean 'x'?" for the known names that come close to `name`, or an empty text."""
    close = [repr(each) for each in get_close_matches(name, list(known), n=3, cutoff=_LEAST_ALIKE)]
    if not close:
        return ""
    *others, last = close
    return f": did you mean {', '.join(others)} or {last}?" if others else f": did you mean {last}?"


def bare(name: str) -> str:
    """Return a name in small letters, with a plus spelled out and without separators: "vDNN++" becomes "vdnnpp"."""
    return re.sub(r"[\s_-]", "", name.lower().replace("+", "p"))
