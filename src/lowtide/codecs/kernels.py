"""The native functions of codecs: built on first use, without torch, and called without the GIL."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np

from lowtide.codecs.contract import Bytes, NoRoom, Unencodable
from lowtide.codecs.library import CODECS
from lowtide.compiled import loaded
from lowtide.errors import NativeUnavailable

_NO_ROOM, _REFUSED = -1, -2


@dataclass(frozen=True, slots=True)
class Kernel:
    """A pair of functions of `native/codecs.cpp`, which says what they are called with."""

    symbol: str

    def encode(self, raw: Bytes, *, out: Bytes | None, most_bytes: int) -> Bytes:
        """Return the blob of `raw`, which is `most_bytes` long at most: the beginning of `out`, if that is given."""
        room = np.empty(most_bytes, np.uint8) if out is None else out
        encode = getattr(_library(), f"lc_encode_{self.symbol}")
        nbytes: int = encode(raw.ctypes.data, raw.nbytes, room.ctypes.data, room.nbytes)
        if nbytes == _NO_ROOM:
            raise NoRoom(f"cannot encode into {room.nbytes} bytes: this takes more, {most_bytes} at most")
        if nbytes == _REFUSED:
            raise Unencodable(f"{self.symbol} cannot hold one of the values: scale them down or store them as they are")
        return room[:nbytes]

    def decode(self, blob: Bytes, *, out: Bytes) -> None:
        """Fill `out` with what `blob` was made of."""
        decode = getattr(_library(), f"lc_decode_{self.symbol}")
        if decode(blob.ctypes.data, blob.nbytes, out.ctypes.data, out.nbytes) != 0:
            raise ValueError(f"these {blob.nbytes} bytes are not a {self.symbol} blob of {out.nbytes} bytes")

    def addresses(self) -> tuple[int, int]:
        """Return where the two functions are, for callers that are native themselves."""
        library = _library()
        found = (getattr(library, f"lc_{way}_{self.symbol}") for way in ("encode", "decode"))
        encode, decode = (ctypes.cast(function, ctypes.c_void_p).value for function in found)
        assert encode is not None
        assert decode is not None
        return encode, decode


def use_portable(on: bool) -> bool:
    """Have the portable kernels run on this processor too; tell whether it has others: for tests and comparisons."""
    return bool(_library().lc_use_portable(int(on)))


@cache
def _tried() -> ctypes.CDLL | str:
    try:
        return loaded(CODECS, lambda path: _declared(ctypes.CDLL(str(path))))
    except NativeUnavailable as error:
        return str(error)


def _library() -> ctypes.CDLL:
    found = _tried()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


_SYMBOLS = [
    "zvc1",
    "zvc2",
    "zvc4",
    "zvc8",
    "bits",
    "signs",
    "ssdc",
    "pack32",
    "pack16",
    "fp16",
    "bf16",
    "fp10",
    "fp8_e4m3",
    "fp8_e5m2",
]


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    for symbol in _SYMBOLS:
        encode, decode = (getattr(library, f"lc_{way}_{symbol}") for way in ("encode", "decode"))
        encode.argtypes = decode.argtypes = [pointer, i64, pointer, i64]
        encode.restype, decode.restype = i64, ctypes.c_int
    library.lc_use_portable.argtypes, library.lc_use_portable.restype = [ctypes.c_int], ctypes.c_int
    return library
