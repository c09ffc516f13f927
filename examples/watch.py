"""Write every step to a file and to TensorBoard. Needs no data.

python examples/watch.py [--log steps.jsonl] [--tensorboard DIR]
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import lowtide
from lowtide.core.step_record import StepRecord
from lowtide.live import to_jsonl, to_tensorboard


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", default="steps.jsonl")
    parser.add_argument("--tensorboard", metavar="DIR", default=None)
    arguments = parser.parse_args()

    def show(record: StepRecord) -> None:
        slowdown = "not known yet" if record.slowdown is None else f"{record.slowdown:.2f}x of the predicted step"
        print(f"step {record.step}: {record.step_s:.3f} s, waited {record.stall_s:.3f} s, {slowdown}")

    model, optimizer = build()
    with lowtide.fit(model, optimizer, budget="20MiB") as tide:
        tide.on_step(show)
        tide.on_step(to_jsonl(arguments.log))
        if arguments.tensorboard is not None:
            tide.on_step(to_tensorboard(arguments.tensorboard))
        for number in range(6):
            x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(number))
            with tide.step():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
