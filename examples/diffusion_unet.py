"""Train a small U-Net to predict noise, as diffusion models do, beside an average of its weights. Needs no data.

python examples/diffusion_unet.py [--budget 24MiB | --stock]
"""

from __future__ import annotations

import argparse
import copy
import hashlib
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide


class Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1)
        self.time, self.second = nn.Linear(64, after), nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(functional.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(functional.silu(hidden))


class UNet(nn.Module):
    """Two levels down, attention in the middle, two levels up with what the way down kept."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.begin, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList([Block(width, width), Block(width, 2 * width)])
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.up = nn.ModuleList([Block(4 * width, width), Block(2 * width, width)])

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angle = time[:, None] * torch.arange(1, 33) / 32
        time, x, kept = torch.cat([angle.sin(), angle.cos()], 1), self.begin(x), []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        flat = x.flatten(2).transpose(1, 2)
        x = x + self.attention(flat, flat, flat)[0].transpose(1, 2).reshape(x.shape)
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2), kept.pop()], 1), time)
        return self.end(x)


def digest(*models: nn.Module) -> str:
    found = hashlib.sha256()
    for model in models:
        for tensor in model.state_dict().values():
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="24MiB")
    parser.add_argument("--stock", action="store_true", help="train without Lowtide")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = UNet()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with nullcontext() if arguments.stock else lowtide.fit(model, optimizer, budget=arguments.budget) as tide:
        for _ in range(4):
            with nullcontext() if tide is None else tide.step():
                images, noise, time = torch.randn(8, 3, 32, 32), torch.randn(8, 3, 32, 32), torch.rand(8)
                share = time[:, None, None, None]
                loss = functional.mse_loss(model((1 - share) * images + share * noise, time), noise)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(weight, 0.1)
        if tide is not None:
            stats = tide.stats()
            print(f"{stats['steps']} steps, swapped out {stats['swapped_out_bytes']}, peak {stats['peak_bytes']}")
    print("parameters", digest(model, average))


if __name__ == "__main__":
    main()
