"""Cori: finds how often to migrate from how often data is reused (Doudali et al., IPDPS 2021).

The reuse times of all data are collected; the dominant reuse DR is their mean, weighted by how often each occurs among
the frequent ones. Multiples of it are tried as the period, k DR for k = 1, 2, ..., until one is no better than the
last. Cori sits on top of a system with a period; here that is Sentinel, and the period its migration interval in
layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import nothing_to_place
from lowtide.plan.policies.sentinel import Profile, Sentinel
from lowtide.plan.policy import About, Classified, Family, Runs

# A reuse time is frequent if it has at least this share of the most frequent one's count.
FREQUENT = 0.1


class Cori:
    """Sentinel with its interval found by dominant reuse."""

    name = "cori"
    summary = "slow memory read in place: Sentinel with an interval found from how soon storages are used again"
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="page", memory="fast and slow memory", moment="dynamic", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="Cori (Doudali et al., IPDPS 2021, arXiv 2101.07200)",
        reconstructed="the bins are reuse times in layers; the first of two trials that is no better ends the search",
    )

    def plan(self, problem: Problem) -> Plan:
        """Return Sentinel's plan with the period that the trials settle on."""
        if (nothing := nothing_to_place(self.name, problem)) is not None:
            return nothing
        profile = Profile(problem)
        plans: dict[int, Plan] = {}

        def trial(layers: int) -> float:
            plans[layers] = Sentinel(layers=layers).plan(problem)
            prediction = plans[layers].prediction
            assert prediction is not None
            return prediction.step_s + (1e9 if prediction.peak_bytes > problem.budget_bytes else 0.0)

        period = tuned(reuse_times(profile), trial, most=profile.layer_count)
        note = f"dominant reuse {dominant_reuse(reuse_times(profile)):.1f} layers; {len(plans)} periods tried"
        found = plans[period]
        return Plan(
            policy=self.name,
            budget_bytes=problem.budget_bytes,
            places=found.places,
            prediction=found.prediction,
            notes=(note, *found.notes),
            trials=len(plans),
        )


def reuse_times(profile: Profile) -> list[int]:
    """Return how many layers lie between touches of long-lived storages, for each pair of them."""
    count, layers = profile.memory.count, profile.layer_count
    found = []
    for storage, life in profile.memory.lives.items():
        if storage in profile.short_lived:
            continue
        numbers = [profile.layer[op % count] + layers * (op // count) for op in life.touches]
        found += [later - earlier for earlier, later in pairwise(numbers) if later > earlier]
    return found


def dominant_reuse(reuses: Sequence[int]) -> float:
    """Return the mean of the frequent reuse times, weighted by how often they occur."""
    counts = Counter(reuses)
    most = max(counts.values(), default=0)
    frequent = {reuse: count for reuse, count in counts.items() if count >= FREQUENT * most}
    return sum(reuse * count for reuse, count in frequent.items()) / sum(frequent.values()) if frequent else 1.0


def tuned(reuses: Sequence[int], trial: Callable[[int], float], *, most: int) -> int:
    """Return the multiple of the dominant reuse after which trials stop getting better."""
    dominant = max(1, round(dominant_reuse(reuses)))
    best, best_s = min(dominant, most), trial(min(dominant, most))
    for multiple in range(2, max(2, most // dominant) + 1):
        period = min(multiple * dominant, most)
        if period == best:
            break
        took_s = trial(period)
        if took_s >= best_s:
            break
        best, best_s = period, took_s
    return best
