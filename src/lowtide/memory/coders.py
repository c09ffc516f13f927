"""Codecs as the movers call them: native ones by their addresses, those in Python through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from lowtide.codecs.contract import Bytes, Codec, Exactness
from lowtide.memory.native import Native

_Call = Callable[[int, int, int, int], int]

_NOT_ENCODED = -1


def add_coders(native: Native, codecs: Sequence[Codec], *, max_error: float = inf) -> dict[str, int]:
    """Make codecs known to the movers, and return their numbers by name; "identity" is none.

    `max_error`: what those that round may be off, in terms of the largest value of a frame.
    """
    numbers = {"identity": 0}
    for codec in codecs:
        most_error = 0.0 if codec.exactness is Exactness.BITS else max_error
        if codec.kernel is not None:
            numbers[codec.name] = native.coder_add(codec.kernel.addresses(), most_error=most_error)
        else:
            encode, decode = _calls(codec)
            numbers[codec.name] = native.coder_add_python(encode, decode, most_error=most_error)
    return numbers


def _calls(codec: Codec) -> tuple[_Call, _Call]:
    """Return a codec's two functions on memory; what goes wrong in them is a frame that is not encoded, or changed."""
    dtype = np.uint8 if codec.exactness is Exactness.BITS else np.float32

    def encode(values: int, nbytes: int, blob: int, room_bytes: int) -> int:
        try:
            return codec.encode(_memory(values, nbytes).view(dtype), out=_memory(blob, room_bytes)).nbytes
        except BaseException:  # noqa: BLE001  # a mover cannot raise: the bytes go unencoded
            return _NOT_ENCODED

    def decode(blob: int, blob_bytes: int, values: int, nbytes: int) -> int:
        try:
            codec.decode(_memory(blob, blob_bytes), out=_memory(values, nbytes).view(dtype))
        except BaseException:  # noqa: BLE001  # and here the transfer fails
            return -1
        return 0

    return encode, decode


def _memory(address: int, nbytes: int) -> Bytes:
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B"), np.uint8)
