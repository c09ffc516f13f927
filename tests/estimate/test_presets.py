"""Presets: possible machines, each figure with its source, on the page as in the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.core.plan import Problem
from lowtide.core.serialize import dumps, loads
from lowtide.errors import BadArgument
from lowtide.estimate import PRESETS, machine
from lowtide.estimate.machine_table import markdown
from lowtide.estimate.predictors.loggp import fit_error, fit_line

PAGE = Path(__file__).parents[2] / "docs" / "machines.md"
every_preset = pytest.mark.parametrize("name", PRESETS)


@every_preset
def test_a_preset_is_a_possible_machine_whose_every_figure_has_a_source(name: str) -> None:
    preset = PRESETS[name]
    found = preset.machine
    assert found.name == name
    assert found.flops_per_s is not None
    assert found.memory_bytes_per_s is not None
    assert found.capacity_bytes is not None
    assert found.flops_per_s > 1e11
    assert found.capacity_bytes >= 8 << 30
    assert set(preset.sources) == {
        "flops_per_s",
        "memory_bytes_per_s",
        "capacity_bytes",
        "page_fault_s",
        *found.links,
    }
    assert all(len(source) > 5 for source in preset.sources.values())
    for link in found.links.values():
        assert 0 < link.write_bytes_per_s < found.memory_bytes_per_s
        assert 0 < link.read_bytes_per_s < found.memory_bytes_per_s
        assert 0 < link.read_latency_s < 1e-2
    assert Problem.__dataclass_fields__["tier"].default in found.links


@every_preset
def test_a_preset_survives_a_file(name: str) -> None:
    assert loads(dumps(machine(name))) == machine(name)


def test_the_machines_that_the_papers_used_are_there() -> None:
    assert {"k40c", "titan-x", "v100", "v100-nvlink", "a100", "h100", "cpu", "dram-optane", "hbm-dram"} <= set(PRESETS)
    assert {"remote-25gbe", "remote-100gbe"} <= set(PRESETS)
    cards = [p.machine.capacity_bytes or 0 for name, p in PRESETS.items() if name.startswith(("gtx", "rtx"))]
    assert min(cards) == 8 << 30
    assert max(cards) == 24 << 30
    assert machine("V100 NVLink") is machine("v100-nvlink")


def test_slow_memory_is_slower_to_write_than_to_read_and_slower_still_when_both_are_mixed() -> None:
    optane = machine("optane").links["spill"].access
    assert optane is not None
    read_s = optane.access_s(read_bytes=1e9, written_bytes=0, operands=1)
    write_s = optane.access_s(read_bytes=0, written_bytes=1e9, operands=1)
    both_s = optane.access_s(read_bytes=1e9, written_bytes=1e9, operands=2)
    assert write_s > 2.5 * read_s
    assert both_s == pytest.approx((read_s + write_s) / optane.mixed_share, rel=1e-3)
    assert optane.access_s(read_bytes=0, written_bytes=0, operands=0) == 0.0


def test_a_copy_that_is_waited_for_has_its_own_rate() -> None:
    link = machine("optane-autotm").links["spill"]
    assert link.write_s(10**9) > 4 * link.write_s(10**9, waited=True)
    assert link.read_s(10**9) > 14 * link.read_s(10**9, waited=True)
    plain = machine("v100").links["spill"]
    assert plain.read_s(10**9) == plain.read_s(10**9, waited=True)


def test_an_unknown_machine_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BadArgument, match="k40c, titan-x, v100") as caught:
        machine("v1000")
    assert "\n" not in str(caught.value)


def test_the_page_of_machines_is_made_from_the_presets() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: python -m lowtide.estimate.machine_table"


def test_the_error_of_a_fit_is_zero_on_a_line_and_grows_off_it() -> None:
    line = [(n, 1e-3 + n / 1e9) for n in (10**5, 10**6, 10**7)]
    latency_s, bytes_per_s = fit_line(line)
    assert fit_error(line, latency_s=latency_s, bytes_per_s=bytes_per_s) < 1e-9
    bent = [*line, (10**8, 1.0)]
    latency_s, bytes_per_s = fit_line(bent)
    assert fit_error(bent, latency_s=latency_s, bytes_per_s=bytes_per_s) > 0.05
    with pytest.raises(ValueError, match="measure at least one"):
        fit_error([], latency_s=0, bytes_per_s=1)
