"""Reads untrusted JSON field by field: everything is checked, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable, Sized
from enum import StrEnum
from typing import TypeVar

_Any = TypeVar("_Any")
_Member = TypeVar("_Member", bound=StrEnum)


class Damaged(Exception):
    """A file's content is not what its format says; the message says where."""


def integer(value: object) -> int:
    """Return an integer."""
    if type(value) is not int or abs(value) >= 1 << 63:
        raise Damaged(f"{value!r:.40} is not an integer of at most 64 bits")
    return value


def optional_integer(value: object) -> int | None:
    """Return an integer or nothing."""
    return None if value is None else integer(value)


def text(value: object) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise Damaged(f"{value!r:.40} is not text")
    return value


def truth(value: object) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise Damaged(f"{value!r:.40} is neither true nor false")
    return value


def real(value: object) -> float:
    """Return a number, of which JSON cannot write some but as a text."""
    if value in ("inf", "-inf", "nan"):
        return float(str(value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Damaged(f"{value!r:.40} is not a number")
    try:
        float(value)
    except OverflowError:
        raise Damaged(f"{str(value)[:20]}... has {len(str(abs(value)))} digits, more than any number here") from None
    # An int may stand for itself: a duration given as 0 stays equal to what was saved.
    return value


def optional_real(value: object) -> float | None:
    """Return a number or nothing."""
    return None if value is None else real(value)


def integers(value: object) -> tuple[int, ...]:
    """Return a list of integers."""
    return tuple(integer(item) for item in items(value))


def items(value: object) -> list[object]:
    """Return a list of anything."""
    if not isinstance(value, list):
        raise Damaged(f"{value!r:.40} is not a list")
    return value


class Fields:
    """An object of the file, whose fields are checked as they are read."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise Damaged(f"{where} is not an object")
        self._fields: dict[str, object] = value
        self._where = where

    def get(self, name: str, read: Callable[[object], _Any]) -> _Any:
        """Return the field, read by `read`."""
        if name not in self._fields:
            raise Damaged(f"{self._where} lacks {name!r}")
        try:
            return read(self._fields[name])
        except Damaged as error:
            raise Damaged(f"{name} of {self._where}: {error}") from error

    def column(self, name: str, read: Callable[[object], _Any]) -> list[_Any]:
        """Return a list field, each item read by `read`."""
        return self.get(name, lambda value: [read(item) for item in items(value)])

    def object(self, name: str) -> Fields:
        """Return a field that is an object itself."""
        return self.get(name, lambda value: Fields(value, name))

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._fields)


def check_same_length(where: str, *columns: Sized) -> None:
    """Raise unless the columns have as many items as each other."""
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise Damaged(f"the columns of {where} have different lengths: {sorted(lengths)}")


def member_of(known: type[_Member]) -> Callable[[object], _Member]:
    """Return a reader for the values of an enum."""
    values = {member.value: member for member in known}

    def read(value: object) -> _Member:
        if not isinstance(value, str) or value not in values:
            raise Damaged(f"{value!r:.40} is not a {known.__name__.lower()}")
        return values[value]

    return read


def check_between(where: str, value: int, low: int, high: int) -> None:
    """Raise unless `low <= value <= high`."""
    if not low <= value <= high:
        raise Damaged(f"{where} {value} is not between {low} and {high}")
