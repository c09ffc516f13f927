"""How bytes are encoded: what a codec promises, how much it leaves, and how fast it is here.

values --encode--> blob --decode--> values. Lossless codecs may stand before a tier (`spill="file+zvc:///fast/disk"`);
the others are for simulations and explicit use: by default training stays bit-identical.

A package adds a codec with an entry point of the group `lowtide.codecs` whose object is a codec, or a class or function
that returns one when called without arguments. A built-in name cannot be taken over.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from lowtide.codecs.blosc import Blosc2
from lowtide.codecs.casts import BF16, CASTS, FP8_E4M3, FP8_E5M2, FP10, FP16, Cast, Signs
from lowtide.codecs.chain import AnyCodec, Chain, chained
from lowtide.codecs.comet import Comet
from lowtide.codecs.contract import (
    ArrayCodec,
    ByteCodec,
    Codec,
    Exactness,
    NoRoom,
    Stats,
    Unencodable,
)
from lowtide.codecs.deep_compression import DeepCompression, Huffman
from lowtide.codecs.jpeg_act import JpegAct
from lowtide.codecs.lossless import Bits, Packed, SparseRows, ZeroValue
from lowtide.codecs.rates import Rates, measure
from lowtide.core.spelling import did_you_mean
from lowtide.errors import BadArgument

ENTRY_POINTS = "lowtide.codecs"

_BUILT_IN: dict[str, AnyCodec] = {
    one.name: one
    for one in (
        ZeroValue(),
        ZeroValue(1),
        ZeroValue(2),
        ZeroValue(8),
        Packed(4),
        Packed(2),
        Bits(),
        SparseRows(),
        Blosc2(),
        Blosc2("blosc2_zstd", "ZSTD"),
        Huffman(),
        Signs(),
        *CASTS,
        Comet(),
        JpegAct(),
        DeepCompression(),
    )
}


def codec_names() -> tuple[str, ...]:
    """Return the names of the codecs, without loading a plug-in."""
    return tuple(_BUILT_IN) + tuple(sorted(_plugins().keys() - _BUILT_IN.keys()))


@cache
def codec(name: str) -> Codec:
    """Return a codec by its name, or several in a row: "bf16+zvc2"."""
    return chained([_part(part) for part in name.split("+")])


def _part(name: str) -> AnyCodec:
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        return built_in
    point = _plugins().get(name)
    if point is None:
        meant = did_you_mean(name.lower(), codec_names()) or f": choose one of {', '.join(codec_names())}"
        raise BadArgument(f"unknown codec {name!r}{meant}")
    return _loaded(point)


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _loaded(point: EntryPoint) -> AnyCodec:
    package = point.dist.name if point.dist is not None else point.value
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise BadArgument(
            f"codec '{point.name}' of {package} cannot be loaded: {error}: install its dependencies"
        ) from error
    made = found() if callable(found) else found
    if not isinstance(made, Codec | ArrayCodec | ByteCodec):
        lacking = [name for name in dir(Codec) if not name.startswith("_") and not hasattr(made, name)]
        raise BadArgument(
            f"codec '{point.name}' of {package} is a {type(made).__name__}, which is not a Codec: it lacks "
            f"{', '.join(lacking)}; see lowtide.codecs.contract"
        )
    if made.name != point.name:
        raise BadArgument(f"codec '{point.name}' of {package} calls itself '{made.name}': plans could not find it")
    return made


__all__ = [
    "BF16",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP10",
    "FP16",
    "ArrayCodec",
    "Bits",
    "Blosc2",
    "ByteCodec",
    "Cast",
    "Chain",
    "Codec",
    "Comet",
    "DeepCompression",
    "Exactness",
    "Huffman",
    "JpegAct",
    "NoRoom",
    "Packed",
    "Rates",
    "Signs",
    "SparseRows",
    "Stats",
    "Unencodable",
    "ZeroValue",
    "codec",
    "codec_names",
    "measure",
]
