"""Rows as columns: how the files hold thousands of equal records compactly, and how they are read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any

from lowtide.core.fields import Fields, check_between, integer


def plain(value: object) -> object:
    """Return a value as JSON can hold it: a number that is not finite becomes a text (a link can be that fast)."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def columns(rows: Sequence[object], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return these attributes of all rows, each as one list."""
    return {name: [plain(getattr(row, name)) for row in rows] for name in names}


def table(words: Iterable[str]) -> tuple[list[str], list[int]]:
    """Return the distinct words and the position of each: operators repeat their names thousands of times."""
    places: dict[str, int] = {}
    positions = [places.setdefault(word, len(places)) for word in words]
    return list(places), positions


def entry_of(words: list[Any]) -> Callable[[object], Any]:
    """Return a reader for positions in a table."""

    def read(value: object) -> Any:
        check_between("position", integer(value), 0, len(words) - 1)
        return words[integer(value)]

    return read


def later_column(
    fields: Fields, name: str, read: Callable[[object], Any], *, known: bool, default: object, count: int
) -> list[Any]:
    """Return a column that older files do not have (`known` false): then it is `count` times the default."""
    return fields.column(name, read) if known else [default] * count
