"""Trains plainly and within a budget, in this Python, and prints as JSON what both came to: versions.py runs it."""

from __future__ import annotations

import hashlib
import json
import platform
import sys

import torch

import lowtide

STEPS, WIDTH, DEPTH = 5, 1024, 12
BUDGET_BYTES = 96 * 2**20
SPILL = sys.argv[1]


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(32, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def hash_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def fitted(plain: str, *, put_off: bool) -> dict[str, object]:
    model, optimizer = parts()
    with lowtide.fit(model, optimizer, budget=BUDGET_BYTES, spill=SPILL, put_off=put_off) as tide:
        for _ in range(STEPS):
            with tide.step():
                step(model, optimizer)
        stats = tide.stats()
    return {
        "exact": hash_of(model) == plain,
        "enforced": stats["budget_exact"] is True and stats["over_budget_bytes"] == 0,
        **{name: stats.get(name) for name in ("budget_bytes", "peak_bytes", "swapped_in_bytes", "operators_put_off")},
    }


def main() -> None:
    model, optimizer = parts()
    for _ in range(STEPS):
        step(model, optimizer)
    plain = hash_of(model)
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "libc": " ".join(platform.libc_ver()),
        "fits": [fitted(plain, put_off=False), fitted(plain, put_off=True)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
