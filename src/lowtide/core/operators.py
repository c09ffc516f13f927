"""What an operator's name alone says of it."""

from __future__ import annotations

_RANDOM = ("bernoulli", "dropout", "exponential_", "multinomial", "normal_", "rand", "uniform_")


# They leave parts of what they make unset, or make more where autograd wants it; calls.cpp knows them too.
_UNSET = ("empty", "_ctc_loss", "linalg_lstsq", "_sparse_mm_reduce_impl")


def repeats(name: str) -> bool:
    """Tell whether an operator makes the same when it runs again, as far as its name says."""
    return not draws_random(name) and not leaves_unset(name)


def leaves_unset(name: str) -> bool:
    """Tell whether some of what an operator makes is whatever was in memory before."""
    return any(word in name.lower() for word in _UNSET)


def draws_random(name: str) -> bool:
    """Tell whether an operator draws random numbers: it makes something else when it runs again."""
    return any(word in name.lower() for word in _RANDOM)
