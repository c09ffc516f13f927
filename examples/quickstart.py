"""Train a small convolutional network inside two thirds of the memory that it would take. Needs no data.

python examples/quickstart.py [--budget 460MiB] [--spill DIR]
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import lowtide
from lowtide.core.units import format_bytes


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    width = 3
    for after in (32, 32, 64, 64, 128):
        layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        width = after
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="460MiB")
    parser.add_argument("--spill", default=None)
    arguments = parser.parse_args()

    model, optimizer = build()
    source = torch.Generator().manual_seed(1)
    with lowtide.fit(model, optimizer, budget=arguments.budget, spill=arguments.spill) as tide:
        for number in range(5):
            images = torch.randn(16, 3, 112, 112, generator=source)
            labels = torch.randint(0, 10, (16,), generator=source)
            with tide.step():
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            print(f"step {number}: loss {loss.item():.4f}")
        stats, trace = tide.stats(), tide.trace()
    print(
        f"unmanaged, this step peaks at {format_bytes(trace.peak_bytes)}; no plan can go below "
        f"{format_bytes(trace.floor_bytes())}"
    )
    print(
        f"peak {format_bytes(stats['peak_bytes'])} of {format_bytes(stats['budget_bytes'])}, "
        f"{format_bytes(stats['swapped_out_bytes'])} moved out, {stats['stall_s']:.2f} s stalled"
    )


if __name__ == "__main__":
    main()
