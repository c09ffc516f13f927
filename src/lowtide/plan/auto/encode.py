"""Chooses the codec of each storage that may be swapped: by what a round trip takes, each part after the other.

n bytes take 2 n / B as they are. Through a codec that encodes at Ce, decodes at Cd and saves the share s, they take
2 (1 - s) n / B + n / Ce + n / Cd: less where 2 s / B > 1 / Ce + 1 / Cd. Whether that helps the step is for the search
to find out: transfers may be hidden as it is, and all codecs share one engine.
"""

from __future__ import annotations

from lowtide.core.plan import IDENTITY, Problem
from lowtide.plan.costs.options import Option, Options


def best_codecs(problem: Problem, options: Options) -> dict[int, str]:
    """Return the codec of each storage that is faster through one, within the problem's error."""
    admitted = [one.name for one in problem.codecs if one is not IDENTITY and one.error_bound <= problem.max_error]
    if not admitted or problem.tier in problem.addressable():
        return {}
    found = {}
    for storage in {gap.storage for gap in problem.trace.gaps()}:
        nbytes = problem.trace.storages[storage].nbytes
        rows = [
            options.swap(nbytes, tier=problem.tier, codec=codec, storage=storage)
            for codec in (IDENTITY.name, *admitted)
        ]
        best = min(rows, key=_round_trip_s)  # of equals the first: as it is
        if best.codec != IDENTITY.name:
            found[storage] = best.codec
    return found


def _round_trip_s(row: Option) -> float:
    return row.encode_s + row.write_s + row.read_s + row.decode_s
