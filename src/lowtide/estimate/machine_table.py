"""The presets as a page of documentation, so that figures and sources are written down once."""

from __future__ import annotations

from lowtide.core.machine import Link
from lowtide.core.units import format_bytes, format_rate, format_seconds
from lowtide.estimate.presets import PRESETS

_HEAD = """# Machines

The presets of `lowtide.estimate.machine(name)` and of every `--machine` option. Besides these, a `--machine` may be a
machine file, or `here` for what `lowtide probe` measured.

This page is made from `lowtide/estimate/presets.py` by `python -m lowtide.estimate.machine_table`; a test holds the two
together. Compute is the single-precision peak without tensor cores. `spill` is the tier below fast memory: the host's
memory below an accelerator, a disk, slower or remote memory below a host. Figures that were not measured say so.
"""


def markdown() -> str:
    """Return the page."""
    lines = [_HEAD, "| name | machine | compute | memory | capacity | out / in | latency out / in |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for name, preset in PRESETS.items():
        machine, link = preset.machine, preset.machine.links["spill"]
        cells = (
            f"`{name}`",
            preset.title,
            f"{(machine.flops_per_s or 0) / 1e12:.3g} TFLOP/s",
            format_rate(machine.memory_bytes_per_s or 0),
            format_bytes(machine.capacity_bytes or 0),
            _rates(link),
            f"{format_seconds(link.write_latency_s)} / {format_seconds(link.read_latency_s)}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("\n## Sources\n")
    for name, preset in PRESETS.items():
        lines.append(f"**`{name}`**\n")
        for tier, link in preset.machine.links.items():
            if tier != "spill":
                lines.append(f"- tier `{tier}`, {_rates(link)}: {preset.sources[tier]}")
        ways = "" if preset.machine.links["spill"].duplex else "; one way at a time"
        fault = f"{format_seconds(preset.machine.page_fault_s)} a fault of {format_bytes(preset.machine.page_bytes)}"
        lines += [
            f"- compute: {preset.sources['flops_per_s']}",
            f"- memory: {preset.sources['memory_bytes_per_s']}",
            f"- capacity: {preset.sources['capacity_bytes']}",
            f"- `spill`{_in_place(preset.machine.links['spill'])}: {preset.sources['spill']}{ways}",
            f"- {fault}: {preset.sources['page_fault_s']}\n",
        ]
    return "\n".join(lines)


def _in_place(link: Link) -> str:
    if link.access is None:
        return ""
    written, read = format_rate(link.access.write_bytes_per_s), format_rate(link.access.read_bytes_per_s)
    return f", written and read in place at {written} / {read}"


def _rates(link: Link) -> str:
    return f"{format_rate(link.write_bytes_per_s)} / {format_rate(link.read_bytes_per_s)}"


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())
