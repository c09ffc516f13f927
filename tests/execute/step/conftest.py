"""Settings of the tests of steps whose saved tensors are managed by hooks."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def through_hooks(by_hooks: None) -> None:
    """Manage what autograd saves."""
