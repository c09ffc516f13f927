"""COMET: error-bounded compression of activations, with a bound that follows from training (Jin et al., VLDB 2022).

SZ's scheme in one dimension: every value is rounded to a multiple of twice the error bound, and each multiple is
predicted by the one before it (Lorenzo). What is left is small numbers, which an entropy codec shortens, as in
"comet+huffman". Zeros are multiples: they stay exact, which COMET adds to SZ.

The controller's symbols: eb, the error bound of a layer's input; L, the mean of |loss gradient| at its output; N, the
batch; R, the share of the input's values that are not zero; M, the mean of |momentum| of the layer's weight; a,
COMET's constant for uniform errors. An error that is uniform in [-eb, eb] becomes one of the weight's gradient that is
normal with sigma = a L sqrt(N R) eb, and sigma may be 0.01 M:

    eb = 0.01 M / (a L sqrt(N R))

The constants are from descriptions of the paper; its public code has no controller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from lowtide.codecs.contract import (
    Array,
    Bytes,
    Exactness,
    Stats,
    Unencodable,
    as_bytes,
    bytes_to_fill,
    placed,
    single_precision,
)
from lowtide.errors import BadArgument

# Of the largest value: what lets multiples of twice the bound lie within a signed byte.
USUAL_ERROR = 1 / 254
_HEADER_BYTES = 8
_WIDTHS = (np.int8, np.int16, np.int32)


@dataclass(frozen=True, slots=True)
class Comet:
    """Rounds within `error`, in terms of the largest value, or within `bound_of_all`, if that is given.

    A blob: the step in single precision, the bytes of a code, and the codes' differences, modulo their range.
    """

    name: str = "comet"
    error: float = USUAL_ERROR
    bound_of_all: float | None = None

    exactness = Exactness.BOUND
    kernel = None

    def __post_init__(self) -> None:
        stated = self.error if self.bound_of_all is None else self.bound_of_all
        if not 0 < stated < inf:
            raise BadArgument(f"an error of {stated} is not a bound: use a number above 0")

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return a header and codes as wide as values."""
        return _HEADER_BYTES + nbytes

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return the codes of `values`; refuse what is not finite, and what its codes do not bring back in time."""
        flat = single_precision(values, self.name).reshape(-1)
        largest = float(np.abs(flat).max(initial=0.0))
        if not np.isfinite(largest):
            raise Unencodable(f"{self.name} holds finite values only: store the others as they are")
        bound = self._bound(largest)
        # Shorter than two bounds, for what single precision rounds a multiple by.
        step = np.nextafter(np.float32(2 * (bound - largest * 2**-24)), np.float32(0))
        if step <= 0 < largest:
            raise Unencodable(f"{self.name} cannot tell {bound:.3g} apart beside {largest:.3g}: state a larger error")
        multiples = np.zeros(flat.size) if not largest else np.rint(flat.astype(np.float64) / float(step))
        most = float(np.abs(multiples).max(initial=0.0))
        width = next((one for one in _WIDTHS if most <= np.iinfo(one).max), None)
        if width is None:
            raise Unencodable(f"{self.name} would need {most:.3g} steps of {step:.3g}: state a larger error")
        codes = multiples.astype(width)
        if (np.abs(_values(codes, step).astype(np.float64) - flat) > bound).any():
            raise Unencodable(f"{self.name} cannot bring every value back within {bound:.3g}: state a larger error")
        unsigned = codes.view(_unsigned(width))
        differences = np.diff(unsigned, prepend=unsigned[:0].sum(dtype=unsigned.dtype))
        header = np.zeros(2, np.float32)
        header[0], header[1] = step, codes.itemsize
        return placed(np.concatenate([as_bytes(header), as_bytes(differences)]), out)

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out` with the multiples that the codes say."""
        bytes_to_fill(single_precision(out, self.name))
        if blob.nbytes < _HEADER_BYTES:
            raise ValueError(f"{blob.nbytes} bytes are too few for a {self.name} blob")
        step, itemsize = np.frombuffer(blob[:_HEADER_BYTES].tobytes(), np.float32)
        if itemsize not in (1, 2, 4) or blob.nbytes != _HEADER_BYTES + out.size * int(itemsize):
            raise ValueError(f"{blob.nbytes} bytes are not a {self.name} blob of {out.size} values")
        width = {np.dtype(one).itemsize: one for one in _WIDTHS}[int(itemsize)]
        differences = np.frombuffer(blob[_HEADER_BYTES:].tobytes(), _unsigned(width))
        codes = np.cumsum(differences, dtype=_unsigned(width)).view(width)
        out.reshape(-1)[:] = _values(codes, step)

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return the same for all: a share of the largest, or what was stated."""
        finite = np.abs(np.where(np.isfinite(values), values, 0))
        return np.full(values.shape, self._bound(float(finite.max(initial=0.0))))

    def ratio_model(self, stats: Stats) -> float:  # noqa: ARG002  # zeros take as much as others, before a byte codec
        """Return what codes of a byte leave, where no bound is stated; else what any can."""
        return 1 / 4 if self.bound_of_all is None and self.error >= USUAL_ERROR else 1.0

    def _bound(self, largest: float) -> float:
        return self.error * largest if self.bound_of_all is None else self.bound_of_all


def _values(codes: Array, step: np.float32) -> NDArray[np.float32]:
    return (codes.astype(np.float64) * float(step)).astype(np.float32)


def _unsigned(width: type) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"u{np.dtype(width).itemsize}")


# ---- the controller ----

# Of the gradient's error, for errors of the input that are uniform in [-eb, eb]: sqrt(1/3) would be that of one value
# times a constant gradient; COMET measures 0.32 for gradients as they are spread in networks.
UNIFORM = 0.32
ADMITTED = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeen:
    """What a layer's training shows: means of |momentum| and |loss gradient|, batch, share that is not zero."""

    mean_momentum: float
    mean_loss_gradient: float
    batch: int
    density: float


def gradient_sigma(seen: LayerSeen, error_bound: float, *, constant: float = UNIFORM) -> float:
    """Return the standard deviation of the weight gradient's error that an input's error bound makes."""
    return constant * seen.mean_loss_gradient * sqrt(seen.batch * seen.density) * error_bound


def admitted_error(seen: LayerSeen, *, constant: float = UNIFORM, admitted: float = ADMITTED) -> float:
    """Return the error bound whose gradient error is `admitted` of the mean momentum (infinity: nothing is lost)."""
    per_unit = gradient_sigma(seen, 1.0, constant=constant)
    return admitted * seen.mean_momentum / per_unit if per_unit else inf


@dataclass(slots=True)
class Controller:
    """Keeps the error bound of each layer, and assesses it again every so many iterations."""

    every: int = 100
    constant: float = UNIFORM
    admitted: float = ADMITTED
    bounds: dict[str, float] = field(default_factory=dict)
    _assessed_at: dict[str, int] = field(default_factory=dict)

    def is_due(self, layer: str, iteration: int) -> bool:
        """Tell whether a layer is to be looked at."""
        at = self._assessed_at.get(layer)
        return at is None or iteration - at >= self.every

    def assess(self, layer: str, seen: LayerSeen, *, iteration: int) -> float:
        """Set and return a layer's bound."""
        self._assessed_at[layer] = iteration
        self.bounds[layer] = admitted_error(seen, constant=self.constant, admitted=self.admitted)
        return self.bounds[layer]

    def codec(self, layer: str) -> Comet | None:
        """Return the codec of a layer's input (None: it has no bound yet, or the bound says nothing)."""
        bound = self.bounds.get(layer, 0.0)
        return Comet(bound_of_all=bound) if 0 < bound < inf else None
