"""Translation with LSTMs and additive attention, step by step (Bahdanau et al., 2015)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.zoo.workload import Workload, adam, word_loss

State = tuple[Tensor, Tensor]


class Stack(nn.ModuleList):
    """LSTM cells on top of each other, run one word at a time: each gate is an operator of its own in the trace."""

    def __init__(self, before: int, width: int, layers: int) -> None:
        super().__init__(nn.LSTMCell(before if not layer else width, width) for layer in range(layers))

    def forward(self, x: Tensor, states: list[State]) -> tuple[Tensor, list[State]]:
        """Return the top layer's output and every layer's state."""
        after = []
        for cell, state in zip(self, states, strict=True):
            hidden, memory = cell(x, state)
            after.append((hidden, memory))
            x = hidden
        return x, after


class Seq2Seq(nn.Module):
    """An encoder, a decoder, and attention between the two."""

    def __init__(self, *, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.source = nn.Embedding(vocab, width)
        self.target = nn.Embedding(vocab, width)
        self.encoder = Stack(width, width, layers)
        self.decoder = Stack(2 * width, width, layers)
        self.keys = nn.Linear(width, width, bias=False)
        self.query = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(2 * width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the scores of every word of the translation, given those before it."""
        words = self.source(source)
        zero = words.new_zeros(words.shape[0], words.shape[2])
        states = [(zero, zero) for _ in self.encoder]
        outputs = []
        for word in words.unbind(1):
            top, states = self.encoder(word, states)
            outputs.append(top)
        memory = torch.stack(outputs, dim=1)
        keys = self.keys(memory)
        context, scores = zero, []
        for word in self.target(target).unbind(1):
            top, states = self.decoder(torch.cat([word, context], dim=1), states)
            energy = self.score(torch.tanh(keys + self.query(top).unsqueeze(1)))
            context = (energy.softmax(dim=1) * memory).sum(dim=1)
            scores.append(self.head(torch.cat([top, context], dim=1)))
        return torch.stack(scores, dim=1)


def seq2seq(*, batch: int, layers: int = 2, width: int = 512, vocab: int = 32000, tokens: int = 32) -> Workload:
    """Return the model on sentences of `tokens` words."""
    source, target = torch.randint(vocab, (batch, tokens)), torch.randint(vocab, (batch, tokens))
    return Workload(
        model=Seq2Seq(vocab=vocab, width=width, layers=layers),
        inputs=(source, target),
        loss=word_loss(torch.randint(vocab, (batch, tokens))),
        optimizer=adam(),
    )
