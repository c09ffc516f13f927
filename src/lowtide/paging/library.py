"""The native part of paging: shipped or built on first use, without torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from lowtide.compiled import Library, loaded
from lowtide.errors import NativeUnavailable

PAGER = Library(
    name="liblowtide_pager.so",
    title="the pager",
    build_s=4,
    directory=Path(__file__).parent / "native",
    sources=("pager.cpp",),
)


class Config(ctypes.Structure):
    """What `lp_open` is called with; see native/pager.cpp."""

    _fields_ = (
        ("bytes", ctypes.c_int64),
        ("capacity_bytes", ctypes.c_int64),
        ("prefetch", ctypes.c_int32),
        ("tree_evicts", ctypes.c_int32),
        ("access", ctypes.c_int32),
        ("batch_faults", ctypes.c_int32),
        ("batch_ns", ctypes.c_int64),
        ("free_bytes", ctypes.c_int64),
        ("given", ctypes.c_int32),
        ("line_bytes", ctypes.c_int32),
    )


def load() -> ctypes.CDLL:
    """Return the library, building it first if need be. Raises NativeUnavailable with the reason."""
    found = _tried()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


@cache
def _tried() -> ctypes.CDLL | str:
    try:
        return loaded(PAGER, lambda path: _declared(ctypes.CDLL(str(path))))
    except NativeUnavailable as error:
        return str(error)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    results = {
        "lp_open": pointer,
        "lp_base": pointer,
        "lp_tree_fetch": ctypes.c_uint64,
        "lp_tree_evict": ctypes.c_uint64,
    }
    arguments = {
        "lp_open": (ctypes.POINTER(Config), ctypes.c_int, ctypes.POINTER(ctypes.c_int)),
        "lp_close": (pointer,),
        "lp_base": (pointer,),
        "lp_kernel_too": (pointer,),
        "lp_counters": (pointer, pointer),
        "lp_push": (pointer, number, number),
        "lp_arm": (pointer,),
        "lp_write_counts": (pointer, pointer),
        "lp_tree_fetch": (ctypes.c_uint64, ctypes.c_int, ctypes.c_int),
        "lp_tree_evict": (ctypes.c_uint64, ctypes.c_int, ctypes.c_int),
        "lp_majority": (ctypes.POINTER(number), ctypes.c_int, ctypes.POINTER(number)),
    }
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = results.get(name, ctypes.c_int)
    return library


def majority(deltas: Sequence[int]) -> int | None:
    """Return Leap's trend: the delta that more than half of a window of the newest ones have; the newest comes last."""
    trend = ctypes.c_int64()
    found = load().lp_majority((ctypes.c_int64 * len(deltas))(*deltas), len(deltas), ctypes.byref(trend))
    return trend.value if found else None


def tree_fetched(there: set[int], leaf: int, *, leaves: int = 32) -> set[int]:
    """Return the leaves that come when one of a tree is touched, with those that are there."""
    return _members(load().lp_tree_fetch(_bits(there), leaves, leaf))


def tree_evicted(there: set[int], leaf: int, *, leaves: int = 32) -> set[int]:
    """Return the leaves that go with one of a tree, itself among them."""
    return _members(load().lp_tree_evict(_bits(there), leaves, leaf))


def _bits(members: set[int]) -> int:
    return sum(1 << member for member in members)


def _members(bits: int) -> set[int]:
    return {k for k in range(64) if bits >> k & 1}
