"""Which storages leave first when memory runs out."""

from __future__ import annotations

from enum import StrEnum


class Order(StrEnum):
    """Which storages leave first when memory runs out despite a plan, or without one."""

    NOTHING = "nothing"
    """None: a step that does not fit is refused."""
    OLDEST = "oldest"
    """The least recently used."""
    FURTHEST = "furthest"
    """The furthest next use; where it is not known or equal, the least recently used."""
    FURTHEST_NEWEST = "furthest-newest"
    """The furthest next use; where it is not known or equal, the newest: an old one may be due soon."""
    FURTHEST_CHEAPEST = "furthest-cheapest"
    """The furthest next use; among similar ones those that cost no write, and then the oldest."""
    LARGEST = "largest"
    """The largest."""
    LARGEST_AREA = "largest-area"
    """The largest product of bytes and time until the next use, as far as that is known."""
    FIRST_THAT_SUFFICES = "first-that-suffices"
    """The oldest one that is large enough; if none is, several of the oldest."""
    CHEAPEST = "cheapest"
    """The least time to make it again, for its bytes; where nothing is made again all take the same."""
    CHEAPEST_STALE = "cheapest-stale"
    """The least time to make it again, for its bytes and the time since it was last touched."""
