"""Settings of the tests of checkpoints: those of the runtime."""

from __future__ import annotations

from tests.execute.conftest import no_hang, one_compute_thread

__all__ = ["no_hang", "one_compute_thread"]
