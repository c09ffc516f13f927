"""What the emulator costs: plain training on `sim`, as fast as memory, against plain training on the CPU.

    python benchmarks/emulator_overhead.py --models gpt resnet50 --scale 4 --rounds 5 --out overhead.json

Both train the same weights on the same batches in one process, one step each in turn, so that whatever else the machine
does meets both. The losses must be equal to the last bit, or the run ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

import lowtide.emulator
from benchmarks.models import MODELS, Benchmark, Sizes

WARM_UP_STEPS = 2


class Trainee:
    """One training, on one device."""

    def __init__(self, benchmark: Benchmark, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.benchmark = device, benchmark
        self.model = benchmark.build().to(device)
        self.optimizer = benchmark.optimizer(self.model)
        self.losses: list[float] = []

    def step_s(self, index: int) -> float:
        x, y = self.benchmark.batch(torch.Generator().manual_seed(index))
        torch.manual_seed(index)
        torch.accelerator.synchronize()
        begin_s = time.perf_counter()
        with torch.device(self.device):
            loss = self.benchmark.loss(self.model(x.to(self.device)), y.to(self.device))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
        torch.accelerator.synchronize()
        return time.perf_counter() - begin_s


def measure(name: str, *, scale: int, rounds: int) -> dict[str, object]:
    benchmark = MODELS[name](Sizes(scale=scale))
    trainees = {device: Trainee(benchmark, device) for device in ("cpu", "sim")}
    steps: dict[str, list[float]] = {device: [] for device in trainees}
    for index in range(WARM_UP_STEPS + rounds):
        order = list(trainees) if index % 2 else list(reversed(trainees))
        for device in order:
            took_s = trainees[device].step_s(index)
            if index >= WARM_UP_STEPS:
                steps[device].append(took_s)
    ratios = [sim / cpu for sim, cpu in zip(steps["sim"], steps["cpu"], strict=True)]
    return {
        "model": name,
        "title": benchmark.title,
        "cpu_s": statistics.median(steps["cpu"]),
        "sim_s": statistics.median(steps["sim"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "losses_equal": trainees["cpu"].losses == trainees["sim"].losses,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "resnet50", "vgg16", "bert"], choices=sorted(MODELS))
    parser.add_argument("--scale", type=int, default=4, help="divides the batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--capacity", default="6GiB")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lowtide.emulator.enable(options.capacity)
    results = []
    for name in options.models:
        result = measure(name, scale=options.scale, rounds=options.rounds)
        results.append(result)
        same = "equal" if result["losses_equal"] else "DIFFER"
        cpu_s, sim_s, ratio = result["cpu_s"], result["sim_s"], result["ratio"]
        print(f"{result['title']}: cpu {cpu_s:.3f} s, sim {sim_s:.3f} s, ratio {ratio:.3f}; losses {same}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["losses_equal"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
