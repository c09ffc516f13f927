"""Runs a command beside this process, which only waits for it: signals go on to it, its exit code comes back."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

from lowtide.errors import BadArgument

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def run_command(command: Sequence[str]) -> int:
    """Run a command with this process's environment and streams; return its exit code, 128 + n after signal n.

    Ctrl-C reaches it from the terminal, as a member of the same group: here it is only waited for.
    """
    try:
        child = subprocess.Popen(list(command))
    except OSError as error:
        raise BadArgument(f"{command[0]} cannot be run ({error.strerror or error}): check the path") from None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child.poll() is None:
            os.kill(child.pid, number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code
