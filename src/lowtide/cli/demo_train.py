"""A small GPT trained on synthetic text: plain PyTorch that knows nothing of Lowtide.

`lowtide demo` runs it with and without a budget. Each step prints one line, "step <n> <loss as float hex> <seconds>",
so that two runs can be compared to the last bit.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F  # noqa: N812 - everyone calls it F
from torch import Tensor, nn

VOCABULARY = 512


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.from_heads = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` after one layer."""
        batch, tokens, width = x.shape
        qkv = self.to_qkv(self.before_attention(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(seen.transpose(1, 2).reshape(batch, tokens, width))
        y: Tensor = x + self.mlp(self.before_mlp(x))
        return y


class Gpt(nn.Module):
    """Token and position embeddings, blocks, and a head that shares the embedding's weights."""

    def __init__(self, *, layers: int, width: int, tokens: int, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of every next token."""
        logits: Tensor = self.head(self.norm(self.blocks(self.token(text) + self.position)))
        return logits


def main() -> None:
    """Train for a few steps and print each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Gpt(layers=args.layers, width=args.width, tokens=args.tokens)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(args.steps):
        begun = time.perf_counter()
        # Counting upwards from a random start: something a model can learn in a few steps.
        text = (torch.randint(VOCABULARY, (args.batch, 1)) + torch.arange(args.tokens + 1)) % VOCABULARY
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} {float(loss.detach()).hex()} {time.perf_counter() - begun:.4f}", flush=True)


if __name__ == "__main__":
    main()
