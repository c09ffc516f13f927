"""What a user may have meant by a name that nothing has."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean 'x'?" for the known names that come close to `name`, or nothing."""
    close = get_close_matches(name, list(known), n=3, cutoff=0.6)
    if not close:
        return ""
    return f": did you mean {' or '.join(repr(each) for each in close)}?"
