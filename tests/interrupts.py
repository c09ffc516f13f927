"""Ctrl-C for children of tests, also where the tests themselves were started with it ignored (`make test &`)."""

from __future__ import annotations

import signal


def feel_interrupts() -> None:
    """Begin with the default handler: Python installs its own only where SIGINT is not ignored. For `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
