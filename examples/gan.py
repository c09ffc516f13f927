"""A GAN with two optimizers, without a word of Lowtide; --compile runs both networks through torch.compile.

lowtide run --budget 12MiB examples/gan.py
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn
from torch.nn import functional


def network() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.LeakyReLU(0.2))])


def main() -> None:
    torch.manual_seed(0)
    maker, judge = network(), nn.Sequential(*network(), nn.Linear(256, 1))
    better_maker = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
    better_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    make, assess = (torch.compile(maker), torch.compile(judge)) if "--compile" in sys.argv else (maker, judge)
    right, wrong = torch.ones(1024, 1), torch.zeros(1024, 1)
    loss_of = functional.binary_cross_entropy_with_logits
    for _ in range(4):
        made = make(torch.randn(1024, 256))
        better_judge.zero_grad()
        (loss_of(assess(torch.randn(1024, 256)), right) + loss_of(assess(made.detach()), wrong)).backward()
        better_judge.step()
        better_maker.zero_grad()
        loss_of(assess(made), right).backward()
        better_maker.step()
    found = hashlib.sha256()
    for tensor in [*maker.state_dict().values(), *judge.state_dict().values()]:
        found.update(tensor.detach().numpy().tobytes())
    print("parameters", found.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
