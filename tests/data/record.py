"""Records the traces beside this file: one small step of each model. Run it again when the trace format changes.

python tests/data/record.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from benchmarks.models import LanguageModel, resnet50, vgg16
from lowtide import capture_step
from lowtide.core.serialize import save


def _record(name: str, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        outputs = module(inputs)
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = capture_step(step, model=module, optimizer=optimizer)
    path = Path(__file__).with_name(f"{name}.trace")
    save(trace, path)
    print(f"{path.name}: {len(trace.ops)} operators, {len(trace.gaps())} gaps, {path.stat().st_size} bytes")


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))
    _record("resnet", resnet50(classes=10), images, labels)
    _record("vgg", vgg16(classes=10), images, labels)
    words = torch.randint(256, (8, 65))
    gpt = LanguageModel(vocabulary=256, width=128, depth=4, heads=4, tokens=64, causal=True, dropout=0.1)
    _record("gpt", gpt, words[:, :-1], words[:, 1:])


if __name__ == "__main__":
    main()
