"""The machine that a runtime plans for: measured before, or measured now and remembered while the process lives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lowtide.core.machine import Link, Machine
from lowtide.estimate.calibrate import SPILL, assumed_machine, load_machine, measure_link
from lowtide.tiers.medium import Medium

_measured: dict[tuple[int, ...], Link] = {}


def machine_for(medium: Medium) -> Machine:
    """Return the machine with the link to `medium`; an unused medium is measured once for each set of disks."""
    directories: tuple[Path, ...] = tuple(getattr(medium, "directories", ()))
    saved = load_machine(directories=directories) if directories else None
    if saved is not None:
        return saved
    disks = tuple(directory.stat().st_dev for directory in directories)
    if not disks or disks not in _measured:
        try:
            link = measure_link(medium)
        except OSError:
            return assumed_machine()  # too full or too small to measure: it may still take what little it has room for
        if disks:
            _measured[disks] = link
    else:
        link = _measured[disks]
    return replace(assumed_machine(), name="this machine", links={SPILL: link}, source="measured")
