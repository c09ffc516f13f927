"""Settings of the tests of recomputation by a dispatch mode, as on an accelerator."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def through_hooks(by_hooks: None) -> None:
    """Manage what autograd saves."""
