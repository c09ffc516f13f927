"""Bad knobs are refused in one line; presets keep a GPU's ratio of link to compute."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lowtide.emulator import PRESETS, Emulator, check, enable, preset
from lowtide.emulator.device import cpu_flops_per_s
from lowtide.errors import BadArgument


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"capacity": "2G"}, "GiB (binary) or GB (decimal)"),
        ({"capacity": 0}, "no memory"),
        ({"capacity": -5}, "no memory"),
        ({"capacity": "100TiB"}, "machine's memory"),
        ({"capacity": "16GiB", "devices": 8}, "machine's memory"),
        ({"preset": "vax780"}, "unknown preset 'vax780': use one of"),
        ({"slowdown": 0.5}, "slowdown"),
        ({"d2h_bytes_per_s": -1}, "d2h_bytes_per_s"),
        ({"jitter_s": float("nan")}, "jitter_s"),
        ({"latency_s": float("inf")}, "latency_s"),
        ({"devices": 9}, "devices"),
        ({"queue_depth": 0}, "queue_depth"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_bad_knob_is_refused_in_one_line_and_nothing_is_registered(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument) as caught:
        enable(**({"capacity": "1MiB"} | knobs))
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("knobs", "words"),
    [({"sped": 1}, "unknown knob 'sped'"), ({"devices": 3}, "fixed"), ({"slowdown": 0}, "slowdown")],
)
def test_a_bad_change_is_refused_and_changes_nothing(sim: Emulator, knobs: dict[str, Any], words: str) -> None:
    before = sim.settings
    with pytest.raises(BadArgument, match=words):
        sim.configure(**knobs)
    assert sim.settings == before


def test_a_device_that_does_not_exist_has_no_statistics(sim: Emulator) -> None:
    with pytest.raises(BadArgument, match="no device sim:2"):
        sim.stats(2)


@pytest.mark.parametrize("name", ["v100", "V100", "v100_pcie3", "v100-pcie"])
def test_a_preset_is_found_by_its_usual_spellings(name: str) -> None:
    assert preset(name) is PRESETS["v100"]


@pytest.mark.parametrize("gpu", PRESETS.values(), ids=PRESETS)
def test_a_scaled_link_moves_as_many_bytes_for_each_operation_as_the_gpus(gpu: Any) -> None:
    cpu_flops_per_s = 1e11
    bytes_per_flop = gpu.d2h_bytes_per_s / gpu.flops_per_s
    assert gpu.d2h_bytes_per_s * gpu.scale(cpu_flops_per_s) / cpu_flops_per_s == pytest.approx(bytes_per_flop)


def test_enabling_a_preset_scales_the_link_by_this_cpus_speed_and_stated_rates_win(sim: Emulator) -> None:
    gpu = preset("v100")
    settings = sim.configure(preset="v100", h2d_bytes_per_s=5e8)
    assert settings.h2d_bytes_per_s == 5e8
    assert settings.d2h_bytes_per_s == pytest.approx(gpu.d2h_bytes_per_s * cpu_flops_per_s() / gpu.flops_per_s)
    assert settings.latency_s == gpu.latency_s


def test_the_gpus_of_the_papers_have_presets() -> None:
    assert {"v100", "a100", "rtx4090", "titan-x", "k40c"} <= PRESETS.keys()


def test_arguments_are_checked_without_torch() -> None:
    check("1MiB", preset="a100")
    code = "import sys, lowtide.emulator as e; e.check('1MiB', preset='v100'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
