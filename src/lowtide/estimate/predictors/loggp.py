"""The model of a link: latency plus size over bandwidth, fitted to measured transfers.

LogGP with one message in flight per thread (Alexandrov et al., 1995), as used for PCIe by van Werkhoven et al.
(CCGrid 2014). Symbols: a transfer of n bytes takes t(n) = L + n * G, with L the latency in seconds (their L + o) and
G the gap per byte, 1 / bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence


def fit_line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return (latency_s, bytes_per_s) of t = latency + n / bandwidth, fitted to (bytes, seconds) pairs.

    Least squares on relative error, so that small transfers, which tell the latency, count as much as large ones. The
    latency is never negative: where the free fit says so, it is zero and only the bandwidth is fitted.
    """
    points = [(nbytes, seconds) for nbytes, seconds in samples if nbytes > 0 and seconds > 0]
    if not points:
        raise ValueError("no transfer of more than zero bytes and seconds to fit: measure at least one")
    # With weights w = 1 / t^2, minimise sum w (L + n G - t)^2.
    sum_w = sum(1 / t**2 for _, t in points)
    sum_n = sum(n / t**2 for n, t in points)
    sum_nn = sum(n * n / t**2 for n, t in points)
    sum_t = sum(1 / t for _, t in points)
    sum_nt = sum(n / t for n, t in points)
    determinant = sum_w * sum_nn - sum_n**2
    # One size only, or sizes too close to tell latency from bandwidth.
    if determinant <= 1e-9 * sum_w * sum_nn:
        return 0.0, sum_nn / sum_nt
    latency_s = (sum_t * sum_nn - sum_nt * sum_n) / determinant
    gap_s = (sum_w * sum_nt - sum_n * sum_t) / determinant
    if latency_s < 0:
        return 0.0, sum_nn / sum_nt
    if gap_s <= 0:
        # Noise made large transfers look no slower than small ones: trust the best rate that was seen.
        return 0.0, max(n / t for n, t in points)
    return latency_s, 1 / gap_s


def fit_error(samples: Sequence[tuple[int, float]], *, latency_s: float, bytes_per_s: float) -> float:
    """Return the mean relative error of the line on `samples`: whether latency and rate describe the link."""
    points = [(nbytes, seconds) for nbytes, seconds in samples if nbytes > 0 and seconds > 0]
    if not points:
        raise ValueError("no transfer of more than zero bytes and seconds to compare with: measure at least one")
    return sum(abs(latency_s + n / bytes_per_s - t) / t for n, t in points) / len(points)
