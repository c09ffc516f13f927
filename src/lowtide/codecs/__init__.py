"""How bytes are encoded: what a codec promises, how much it leaves, and how fast it is here.

values --encode--> blob --decode--> values. `lossless` codecs may stand before a tier (`spill="file+zvc:///fast/disk"`);
the others are for models and for those who ask for them by hand: training stays the same to the bit.
"""

from __future__ import annotations

from lowtide.codecs.contract import Codec, Stats
from lowtide.codecs.fp16 import Fp16
from lowtide.codecs.rates import Rates, measure
from lowtide.codecs.zvc import ZeroValue
from lowtide.errors import BadArgument

_CODECS: tuple[Codec, ...] = (ZeroValue(), Fp16())


def codec_names() -> tuple[str, ...]:
    """Return the names of the codecs."""
    return tuple(one.name for one in _CODECS)


def codec(name: str) -> Codec:
    """Return a codec by its name."""
    for one in _CODECS:
        if one.name == name:
            return one
    raise BadArgument(f"unknown codec {name!r}: choose one of {', '.join(codec_names())}")


__all__ = ["Codec", "Fp16", "Rates", "Stats", "ZeroValue", "codec", "codec_names", "measure"]
