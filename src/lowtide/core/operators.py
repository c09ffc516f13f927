"""What an operator's name alone says of it."""

from __future__ import annotations

_RANDOM = ("bernoulli", "dropout", "exponential_", "multinomial", "normal_", "rand", "uniform_")


def draws_random(name: str) -> bool:
    """Tell whether an operator draws random numbers: it makes something else when it runs again."""
    return any(word in name.lower() for word in _RANDOM)
