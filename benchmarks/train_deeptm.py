"""Trains DeepTM's agent on small networks and plots how it learnt: python -m benchmarks.train_deeptm --out DIR

The agent is saved as agent.zip (stable-baselines3, for policy="deeptm:agent.zip") and as agent.npz (the network alone,
as in the package); the curve as curve.csv and curve.png. A few minutes of one core.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

from lowtide import capture_model
from lowtide.core.plan import Problem
from lowtide.core.trace import Reach
from lowtide.estimate import machine
from lowtide.plan.rl.agent import export, train

MODELS = {"alexnet": {"batch": 64}, "vgg16": {"batch": 16}, "resnet18": {"batch": 16}, "gpt": {"batch": 4, "layers": 3}}
SHARES = (0.2, 0.3, 0.4, 0.6)


def problems() -> list[Problem]:
    """Return the steps that the agent plays: none of those that it is evaluated on."""
    found = []
    for target in map(machine, ("optane", "cxl")):
        for name, sizes in MODELS.items():
            trace = capture_model(name, fake=True, machine=target, reach=Reach.TOUCHED, **sizes)
            found += [
                Problem(trace=trace, machine=target, budget_bytes=int(share * trace.peak_bytes), can_place=True)
                for share in SHARES
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=24000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    curve: list[tuple[int, float]] = []

    def watch(rounds: int, reward: float) -> None:
        curve.append((rounds, reward))
        print(f"{rounds:6d} rounds, mean reward of an episode {reward:+.4f}", flush=True)

    begun_s = time.perf_counter()
    model = train(problems(), rounds=arguments.rounds, seed=arguments.seed, watch=watch)
    print(f"trained in {time.perf_counter() - begun_s:.0f} s")
    model.save(arguments.out / "agent.zip")
    export(model, arguments.out / "agent.npz")
    with (arguments.out / "curve.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("rounds", "reward"), *curve])
    plot(curve, arguments.out / "curve.png")


def plot(curve: list[tuple[int, float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot([rounds for rounds, _ in curve], [reward for _, reward in curve])
    axes.set_xlabel("rounds played")
    axes.set_ylabel("mean reward of an episode")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
