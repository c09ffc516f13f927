"""Train with Accelerate: its loop, its accumulation, its clipping; one call for the budget.

python examples/accelerate_loop.py [--budget 12MiB | --stock]
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="12MiB")
    parser.add_argument("--stock", action="store_true", help="train without Lowtide")
    arguments = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(512 * 8, 256)), batch_size=512, shuffle=True)
    if arguments.stock:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        model, optimizer, loader = lowtide.prepare(accelerator, model, optimizer, loader, budget=arguments.budget)
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    if not arguments.stock:
        from lowtide.integrations.accelerate import tide_of

        stats = tide_of(accelerator).stats()
        print(f"{stats['steps']} steps, swapped out {stats['swapped_out_bytes']}, peak {stats['peak_bytes']}")
    accelerator.end_training()
    print("parameters", digest(accelerator.unwrap_model(model)))


if __name__ == "__main__":
    main()
