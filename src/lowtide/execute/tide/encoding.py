"""The codecs of a training on the CPU: which there are, what they cost here, and what they leave of its tensors.

What they leave is sampled as tensors leave while a step is recorded (`memory/native/ranges.h`). A storage that stayed
then is taken for one of those that the same operator made.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from functools import cache

import torch

from lowtide.capture.builder import Recorded
from lowtide.codecs import Codec, Exactness, Stats, codec, measure
from lowtide.codecs.rates import typical_values
from lowtide.core.plan import IDENTITY, CodecCost, SampledRatio
from lowtide.errors import BadArgument, NativeUnavailable
from lowtide.tiers.medium import Medium

# Lossless and native; the first of two that leave as much is taken.
USUAL_CODECS = ("zvc", "zvc2", "bits", "pack32", "pack16")

# Those that round, where the user allows it.
ROUNDING_CODECS = ("fp16", "bf16", "fp10", "fp8_e4m3", "fp8_e5m2")

_SEEN_BYTES = 1 << 16
# As much as a frame: what is measured with is outside the budget.
_MEASURED_BYTES = 2 << 20


def open_codecs(names: Sequence[str] | None, medium: Medium, *, max_error: float = 0.0) -> tuple[Codec, ...]:
    """Return the codecs that plans may use before a medium (None: the usual ones, if it has none of its own).

    `max_error`: how far a value may be from what comes back, in terms of the largest beside it (0: every bit does).
    """
    check_error(max_error)
    if isinstance(names, str):
        raise BadArgument(f"codecs={names!r} is a text: pass a list of names, such as [{names!r}]")
    if names is not None:
        found = tuple(codec(name) for name in names)
        for one in found:
            _check_within(one, max_error)
        return found
    if medium.codecs:
        return ()
    rounding = [name for name in ROUNDING_CODECS if relative_error(codec(name)) <= max_error]
    found = tuple(codec(name) for name in (*USUAL_CODECS, *rounding))
    try:
        for one in found:
            _ = one.kernel.addresses() if one.kernel is not None else None
    except NativeUnavailable:
        return ()
    return found


def check_error(max_error: float) -> None:
    """Refuse an error that is none."""
    if not 0 <= max_error < 1:
        raise BadArgument(f"max_error={max_error} is not a relative error: use a number from 0 (exact) to below 1")


def _check_within(one: Codec, max_error: float) -> None:
    if one.exactness.lossless:
        return
    if one.exactness is Exactness.SIGN:
        raise BadArgument(f"codec '{one.name}' keeps signs only, and plans need the numbers: leave it out")
    error = relative_error(one)
    if error > max_error:
        raise BadArgument(
            f"codec '{one.name}' is lossy: values come back up to {error:.3g} of the largest beside them off, and "
            f"max_error={max_error:g} admits less; pass max_error={error:g} to have activations rounded, or none of it"
        )


def relative_error(one: Codec) -> float:
    """Return how far a codec may move a value, in terms of the largest value beside it (0: not at all)."""
    if one.exactness.lossless:
        return 0.0
    values = typical_values(one, Stats(density=0.5), nbytes=_SEEN_BYTES)
    return float(one.bound(values / abs(values).max()).max())  # with a 1 among them: the worst case of a cast


def codec_costs(codecs: Sequence[Codec]) -> tuple[CodecCost, ...]:
    """Return what codecs cost on this machine, and that they leave everything of what was not sampled."""
    return (IDENTITY, *(_cost(one.name) for one in codecs))


def codec_drag() -> float:
    """Return how much longer operators take for each second of a codec.

    Each thread of an operator has an equal part of it. Where there is a thread for every core, one of them shares its
    core with the codec, and all others wait for it.
    """
    return float(torch.get_num_threads() >= len(os.sched_getaffinity(0)))


@cache
def _cost(name: str) -> CodecCost:
    rates = measure(codec(name), Stats(density=0.5), nbytes=_MEASURED_BYTES)
    encode_s, error = 1 / rates.encode_bytes_per_s, relative_error(codec(name))
    if error:
        encode_s += 1 / rates.decode_bytes_per_s  # what was rounded is decoded again, to see how far it is off
    return CodecCost(
        name=name,
        encode_bytes_per_s=1 / encode_s,
        decode_bytes_per_s=rates.decode_bytes_per_s,
        error_bound=error,
    )


class Samples:
    """What codecs leave of the storages of one kind of step, by samples of some of its blocks in each recording.

    A storage is known again by its block, if that was there before the step, or else by its birth.
    """

    def __init__(self) -> None:
        self._shares: dict[Hashable, Mapping[str, float]] = {}

    def note(self, recorded: Recorded, samples: Mapping[int, Mapping[str, float]]) -> None:
        """Take note of samples by the blocks' numbers; later ones count."""
        for key, serial in zip(_keys(recorded), recorded.serials, strict=True):
            if serial in samples:
                self._shares[key] = samples[serial]

    def ratios(self, recorded: Recorded) -> tuple[SampledRatio, ...]:
        """Return what codecs leave of the storages of a recorded step."""
        trace = recorded.trace
        makers = [None if block.producer is None else trace.ops[block.producer].name for block in trace.storages]
        keys = _keys(recorded)
        of_maker: dict[str, dict[str, list[float]]] = {}
        for maker, key in zip(makers, keys, strict=True):
            if maker is not None:
                for name, ratio in self._shares.get(key, {}).items():
                    of_maker.setdefault(maker, {}).setdefault(name, []).append(ratio)
        usual = {
            maker: {name: sum(ratios) / len(ratios) for name, ratios in shares.items()}
            for maker, shares in of_maker.items()
        }
        return tuple(
            SampledRatio(storage=storage, codec=name, ratio=ratio)
            for storage, (maker, key) in enumerate(zip(makers, keys, strict=True))
            for name, ratio in (self._shares.get(key) or usual.get(maker or "", {})).items()
        )


def _keys(recorded: Recorded) -> list[Hashable]:
    births = recorded.births or (None,) * len(recorded.serials)
    return [serial if birth is None else birth for serial, birth in zip(recorded.serials, births, strict=True)]
