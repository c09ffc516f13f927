"""Blosc2: bytes shuffled by their place in a word, then LZ4 or Zstandard (the extra `codecs`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtide.codecs.contract import Bytes
from lowtide.errors import BadArgument

_MOST_BYTES = 2**31 - 64  # of one chunk, less its own overhead


@dataclass(frozen=True, slots=True)
class Blosc2:
    """Lossless, for bytes that repeat: what a ratio is worth is measured, not modelled. One thread."""

    name: str = "blosc2"
    compressor: str = "LZ4"
    word_bytes: int = 4

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return the bytes and a chunk's header of 32."""
        return nbytes + 32

    def encode_bytes(self, raw: Bytes) -> Bytes:
        """Return the blob of `raw`."""
        if raw.nbytes > _MOST_BYTES:
            raise BadArgument(f"blosc2 takes {_MOST_BYTES} bytes at once, not {raw.nbytes}: encode it in parts")
        if not raw.nbytes:
            return raw
        library = _library()
        blob = library.compress2(
            raw,
            codec=getattr(library.Codec, self.compressor),
            clevel=1,
            typesize=self.word_bytes,
            filters=[library.Filter.SHUFFLE],
            nthreads=1,
        )
        return np.frombuffer(blob, np.uint8)

    def decode_bytes(self, blob: Bytes, *, out: Bytes) -> None:
        """Fill `out` with the bytes of `blob`."""
        stated = int(blob[12:16].view(np.uint32)[0]) if blob.nbytes >= 32 else 0  # in the chunk's header
        if stated != blob.nbytes or bool(stated) != bool(out.nbytes):
            raise ValueError(f"these {blob.nbytes} bytes are not a {self.name} blob of {out.nbytes} bytes")
        if not out.nbytes:
            return
        try:
            got = _library().decompress2(blob, dst=out, nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"these {blob.nbytes} bytes are not a {self.name} blob: {error}") from error
        if got is not None and got != out.nbytes:
            raise ValueError(f"these {blob.nbytes} bytes hold {got} bytes, not {out.nbytes}")


def _library() -> Any:
    try:
        import blosc2
    except ImportError as error:
        raise BadArgument("blosc2 is not installed: pip install 'lowtide[codecs]'") from error
    return blosc2
