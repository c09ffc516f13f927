"""Decoders of the Llama family: Llama, Mistral and Qwen differ in sizes, biases and norms of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.errors import BadArgument
from lowtide.zoo.workload import Workload, adam, word_loss


class RmsNorm(nn.Module):
    """Division by the root of the mean square, in single precision, and a scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention whose queries share keys and values in groups."""

    def __init__(
        self, *, width: int, heads: int, kv_heads: int, head_width: int, bias: bool, norms: bool, fused: bool
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width, self.fused = heads, kv_heads, head_width, fused
        self.q = nn.Linear(width, heads * head_width, bias=bias)
        self.k = nn.Linear(width, kv_heads * head_width, bias=bias)
        self.v = nn.Linear(width, kv_heads * head_width, bias=bias)
        self.out = nn.Linear(heads * head_width, width, bias=False)
        self.q_norm: nn.Module = RmsNorm(head_width) if norms else nn.Identity()
        self.k_norm: nn.Module = RmsNorm(head_width) if norms else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return a mixture of the tokens for each token."""
        batch, tokens, _ = x.shape
        q = self.q_norm(self.q(x).view(batch, tokens, self.heads, self.head_width)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(batch, tokens, self.kv_heads, self.head_width)).transpose(1, 2)
        v = self.v(x).view(batch, tokens, self.kv_heads, self.head_width).transpose(1, 2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        if self.kv_heads != self.heads:
            shared = self.heads // self.kv_heads
            k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-2, -1) / self.head_width**0.5).masked_fill(later, float("-inf"))
            mixed = scores.softmax(dim=-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, self.heads * self.head_width))
        return out


class Block(nn.Module):
    """Attention and a gated linear unit, each normalised before and beside a shortcut."""

    def __init__(self, attention: Attention, *, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.attention = attention
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the tokens after attention and the gated unit."""
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        out: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


class Decoder(nn.Module):
    """Tokens in, scores of tokens out."""

    def __init__(self, blocks: nn.ModuleList, *, vocab: int, width: int, head_width: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = blocks
        self.norm = RmsNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head_width = head_width
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of each token."""
        x = self.embedding(ids)
        rates = 10000.0 ** (-torch.arange(0, self.head_width, 2, device=ids.device).float() / self.head_width)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), rates).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        out: Tensor = self.head(self.norm(x))
        return out


def llama(
    *,
    batch: int,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 32,
    head_width: int = 0,
    hidden: int = 11008,
    vocab: int = 32000,
    tokens: int = 2048,
    tied: bool = False,
    bias: bool = False,
    norms: bool = False,
    fused: bool = True,
) -> Workload:
    """Return a decoder that predicts the next word.

    `head_width` 0 is width / heads; `bias`: of queries, keys and values; `norms`: of queries and keys.
    """
    if heads % kv_heads:
        raise BadArgument(f"heads={heads} cannot share kv_heads={kv_heads}: pass a multiple of the kv_heads")
    if not head_width and width % heads:
        raise BadArgument(f"width={width} cannot be shared by heads={heads}: pass a multiple of the heads")
    head_width = head_width or width // heads
    blocks = nn.ModuleList(
        Block(
            Attention(
                width=width,
                heads=heads,
                kv_heads=kv_heads,
                head_width=head_width,
                bias=bias,
                norms=norms,
                fused=fused,
            ),
            width=width,
            hidden=hidden,
        )
        for _ in range(layers)
    )
    return Workload(
        model=Decoder(blocks, vocab=vocab, width=width, head_width=head_width, tied=tied),
        inputs=(torch.randint(vocab, (batch, tokens)),),
        loss=word_loss(torch.randint(vocab, (batch, tokens))),
        optimizer=adam(),
    )
