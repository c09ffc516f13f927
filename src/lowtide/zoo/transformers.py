"""Transformers: BERT, GPT and ViT share one block."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.errors import BadArgument
from lowtide.zoo.workload import Workload, adam, images, word_loss


class Attention(nn.Module):
    """Self-attention: `fused` in one operator, or written out, which saves every probability as older systems do."""

    def __init__(self, *, width: int, heads: int, causal: bool, fused: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.dropout = nn.Dropout(dropout)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a mixture of the tokens for each token."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            p = self.dropout.p if self.training else 0.0
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            if self.causal:
                later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(later, -math.inf)
            mixed = self.dropout(scores.softmax(dim=-1)) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


class Block(nn.Module):
    """Attention and two linear layers, each beside a shortcut; `first` normalises before them, else after."""

    def __init__(self, *, width: int, heads: int, causal: bool, fused: bool, dropout: float, first: bool) -> None:
        super().__init__()
        self.first = first
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width=width, heads=heads, causal=causal, fused=fused, dropout=dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens after attention and the linear layers."""
        if self.first:
            x = x + self.dropout(self.attention(self.norm1(x)))
            x = x + self.dropout(self.mlp(self.norm2(x)))
        else:
            x = self.norm1(x + self.dropout(self.attention(x)))
            x = self.norm2(x + self.dropout(self.mlp(x)))
        return x


def _blocks(
    layers: int, *, width: int, heads: int, causal: bool, fused: bool, dropout: float, first: bool
) -> nn.Module:
    if width % heads:
        raise BadArgument(f"width={width} cannot be shared by heads={heads}: pass a multiple of the heads")
    return nn.Sequential(
        *(
            Block(width=width, heads=heads, causal=causal, fused=fused, dropout=dropout, first=first)
            for _ in range(layers)
        )
    )


class Words(nn.Module):
    """Tokens in, scores of tokens out; the last layer is the embedding."""

    def __init__(self, blocks: nn.Module, *, vocab: int, tokens: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = blocks
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of each token."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.embedding(ids) + self.position(places))
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


def _words(
    *,
    batch: int,
    layers: int,
    width: int,
    heads: int,
    vocab: int,
    tokens: int,
    fused: bool,
    dropout: float,
    causal: bool,
) -> Workload:
    blocks = _blocks(layers, width=width, heads=heads, causal=causal, fused=fused, dropout=dropout, first=causal)
    model = Words(blocks, vocab=vocab, tokens=tokens, width=width, dropout=dropout)
    return Workload(
        model=model,
        inputs=(torch.randint(vocab, (batch, tokens)),),
        loss=word_loss(torch.randint(vocab, (batch, tokens))),
        optimizer=adam(),
    )


def bert(
    *,
    batch: int,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocab: int = 30522,
    tokens: int = 512,
    fused: bool = False,
    dropout: float = 0.1,
) -> Workload:
    """Return a BERT encoder that is scored on every word; its attention is written out, as when it was published."""
    return _words(
        batch=batch,
        layers=layers,
        width=width,
        heads=heads,
        vocab=vocab,
        tokens=tokens,
        fused=fused,
        dropout=dropout,
        causal=False,
    )


def gpt(
    *,
    batch: int,
    layers: int = 12,
    width: int = 512,
    heads: int = 8,
    vocab: int = 50257,
    tokens: int = 512,
    fused: bool = True,
    dropout: float = 0.0,
) -> Workload:
    """Return a GPT that predicts the next word."""
    return _words(
        batch=batch,
        layers=layers,
        width=width,
        heads=heads,
        vocab=vocab,
        tokens=tokens,
        fused=fused,
        dropout=dropout,
        causal=True,
    )


class Vit(nn.Module):
    """An image as a sequence of patches, and one more token for the answer."""

    def __init__(self, blocks: nn.Module, *, image: int, patch: int, width: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.answer = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.blocks = blocks
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of each class."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.answer.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        out: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


def vit(
    *,
    batch: int,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    image: int = 224,
    patch: int = 16,
    classes: int = 1000,
    fused: bool = True,
    dropout: float = 0.0,
) -> Workload:
    """Return a vision transformer."""
    if image % patch:
        raise BadArgument(f"image={image} cannot be cut into patches of {patch}: pass a multiple of the patch")
    blocks = _blocks(layers, width=width, heads=heads, causal=False, fused=fused, dropout=dropout, first=True)
    model = Vit(blocks, image=image, patch=patch, width=width, classes=classes)
    return images(model, batch=batch, image=image, classes=classes)._replace(optimizer=adam())
