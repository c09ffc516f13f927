"""A named GPU's ratio of link to compute, kept on a CPU that computes a hundred times slower.

What decides whether swapping can hide is how many bytes the link moves while the device computes. The figures are
those of `lowtide.estimate.presets`, with their sources; the emulator's link is

    link on this machine = link of the GPU x (FLOP/s of this CPU / FLOP/s of the GPU)

Latencies stay what they are: on a device that computes a hundred times slower they weigh less than on the GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lowtide.errors import BadArgument
from lowtide.estimate.presets import PRESETS as MACHINES

# Our assumption: large single-precision matrix products reach about nine tenths of a data sheet's rate. The CPU's rate
# is that of a large matrix product as well, so both sides of the ratio are the same kind of work.
SUSTAINED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A device and its link to host memory: sustained FLOP/s, bytes per second each way, start-up time, memory."""

    name: str
    title: str
    flops_per_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    latency_s: float
    memory_bytes: int

    def scale(self, cpu_flops_per_s: float) -> float:
        """Return how much slower a CPU of this speed is, as a factor below one for every rate of the link."""
        return cpu_flops_per_s / self.flops_per_s


def _presets() -> dict[str, Preset]:
    found = {}
    for name, stated in MACHINES.items():
        machine, link = stated.machine, stated.machine.links["spill"]
        if machine.flops_per_s is None or machine.capacity_bytes is None:
            continue
        found[name] = Preset(
            name=name,
            title=stated.title,
            flops_per_s=SUSTAINED * machine.flops_per_s,
            d2h_bytes_per_s=link.write_bytes_per_s,
            h2d_bytes_per_s=link.read_bytes_per_s,
            latency_s=max(link.write_latency_s, link.read_latency_s),
            memory_bytes=machine.capacity_bytes,
        )
    return found


PRESETS: dict[str, Preset] = _presets()


def preset(name: str) -> Preset:
    """Return the preset of this name, such as "v100" or "V100_PCIe3". Raises BadArgument."""
    wanted = re.sub(r"[-_ ]pcie\d?$", "", name.lower()).replace("_", "-").replace(" ", "-")
    if wanted not in PRESETS:
        raise BadArgument(f"unknown preset {name!r}: use one of {', '.join(PRESETS)}")
    return PRESETS[wanted]
