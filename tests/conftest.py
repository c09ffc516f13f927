"""What all tests share: the simulated device exists before the first backward of the process, or never."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from lowtide.errors import LowtideError, NativeUnavailable
from lowtide.memory.native import load

DIRECTORIES = {"emulator", "accelerator"}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the native part, whose first use takes a while on a busy machine, before any test's time is limited.

    Enable the emulator if a test of this run needs it: autograd knows the devices that exist when it starts.
    """
    if session.items and not session.config.option.collectonly:
        with suppress(NativeUnavailable):
            load()
    needed = any(DIRECTORIES & set(item.path.parts) for item in session.items)
    if not needed or session.config.option.collectonly or os.environ.get("LOWTIDE_TEST_DEVICE", "sim") != "sim":
        return
    from tests.emulator.devices import fresh

    try:
        fresh()
    except LowtideError as error:
        session.config.issue_config_time_warning(pytest.PytestWarning(f"no emulator: {error}"), stacklevel=1)
