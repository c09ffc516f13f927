"""What all tests share: the simulated device exists before the first backward of the process, or never."""

from __future__ import annotations

import os

import pytest

from lowtide.errors import LowtideError

DIRECTORIES = {"emulator", "accelerator"}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Enable the emulator if a test of this run needs it: autograd knows the devices that exist when it starts."""
    needed = any(DIRECTORIES & set(item.path.parts) for item in session.items)
    if not needed or session.config.option.collectonly or os.environ.get("LOWTIDE_TEST_DEVICE", "sim") != "sim":
        return
    from tests.emulator.devices import fresh

    try:
        fresh()
    except LowtideError as error:
        session.config.issue_config_time_warning(pytest.PytestWarning(f"no emulator: {error}"), stacklevel=1)
