"""The machine that a runtime plans for: measured before, or measured now and remembered while the process lives."""

from __future__ import annotations

from dataclasses import replace

from lowtide.core.machine import Link, Machine
from lowtide.estimate.calibrate import SPILL, assumed_machine, load_machine, measure_link, training_like
from lowtide.tiers.medium import Medium

_measured: dict[tuple[tuple[int, ...], tuple[object, ...]], Link] = {}


def machine_for(medium: Medium) -> Machine:
    """Return the machine with the link to `medium`; an unused medium is measured once for each set of disks.

    A disk with a codec before it is another link than the disk. It is measured with bytes that no codec shortens.
    """
    directories, codecs = medium.directories, medium.codecs
    saved = load_machine(directories=directories) if directories and not codecs else None
    if saved is not None:
        return saved
    disks = tuple(directory.stat().st_dev for directory in directories)
    if not disks or (disks, codecs) not in _measured:
        try:
            link = measure_link(medium, work=training_like())
        except OSError:
            return assumed_machine()  # too full or too small to measure: it may still take what little it has room for
        finally:
            medium.reset_figures()  # what follows is the training's own traffic
        if disks:
            _measured[disks, codecs] = link
    else:
        link = _measured[disks, codecs]
    return replace(assumed_machine(), name="this machine", links={SPILL: link}, source="measured")
