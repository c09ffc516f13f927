"""How long a transfer takes that is cut into chunks and passes several stages, and into how many to cut it.

After van Werkhoven et al. (CCGrid 2014). A stage takes p_i = L_i + (n / k) G_i for each of the k chunks of n bytes, one
chunk at a time; while one stage has a chunk, the others have those before and after it. The first chunk passes all
stages, and each further one costs what the slowest stage takes:

    t(k) = sum of all p_i + (k - 1) max p_i = T_m + (sum of the other T) / k + (k - 1) L_m + what does not depend on k

with T_i = n G_i and m the slowest stage. More chunks overlap more, but each pays the gap between messages, g = L_m. The
best number is k = sqrt((sum of the other T) / g).

Stages that share something (one copy engine for both directions, the memory bus, a core) are slower while the others
are under way as well: `together` says what limits the chunks between the first and the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from lowtide.errors import BadArgument

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What every chunk has to pass: one of n bytes takes `latency_s + n / bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or not self.bytes_per_s > 0:
            raise BadArgument(
                f"a stage of {self.latency_s} s and {self.bytes_per_s} bytes/s passes nothing on: "
                "give a latency of zero or more and a positive rate"
            )

    def seconds(self, nbytes: float) -> float:
        """Return what a chunk of `nbytes` takes."""
        return self.latency_s + nbytes / self.bytes_per_s


def pipeline_s(nbytes: int, stages: Sequence[Stage], *, chunks: int, together: Sequence[Stage] | None = None) -> float:
    """Return how long `nbytes` take through all stages in `chunks` equal chunks."""
    if not stages or chunks < 1:
        raise BadArgument(f"{chunks} chunks through {len(stages)} stages: give one or more of each")
    chunk_bytes = nbytes / chunks
    slowest_s = max(stage.seconds(chunk_bytes) for stage in together or stages)
    return sum(stage.seconds(chunk_bytes) for stage in stages) + (chunks - 1) * slowest_s


def best_chunks(
    nbytes: int, stages: Sequence[Stage], *, together: Sequence[Stage] | None = None, least_bytes: int = PAGE_BYTES
) -> int:
    """Return the number of chunks, of at least `least_bytes` each, with which `nbytes` are through soonest.

    For each stage as the slowest, t(k) falls to the square root above and rises after it. t is the highest of these
    curves: its lowest point is at one of the roots, where two curves cross, or at an end.
    """
    most = max(1, nbytes // least_bytes)
    limits = together or stages
    wanted = {1, most}
    for point in (*_roots(nbytes, stages, limits), *_crossings(nbytes, limits)):
        wanted |= {min(max(1, whole), most) for whole in (math.floor(point), math.ceil(point))}
    return min(sorted(wanted), key=lambda chunks: pipeline_s(nbytes, stages, chunks=chunks, together=together))


def _roots(nbytes: int, stages: Sequence[Stage], limits: Iterable[Stage]) -> list[float]:
    all_s = sum(nbytes / stage.bytes_per_s for stage in stages)
    others = [(all_s - nbytes / limit.bytes_per_s, limit.latency_s) for limit in limits]
    return [math.sqrt(others_s / gap_s) for others_s, gap_s in others if others_s > 0 and gap_s > 0]


def _crossings(nbytes: int, limits: Iterable[Stage]) -> list[float]:
    points = []
    for one, other in combinations(limits, 2):
        later_s = one.latency_s - other.latency_s
        slower_s = nbytes / other.bytes_per_s - nbytes / one.bytes_per_s
        if later_s and slower_s / later_s > 0:
            points.append(slower_s / later_s)
    return points
