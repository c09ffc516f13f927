"""The tables of the benchmark: a cell holds a word, and what went wrong stands below in full."""

from __future__ import annotations

from typing import Any

from benchmarks.table import markdown

MIB = 2**20
REFUSED = (
    "BudgetTooSmall: budget 1008 MiB cannot run 'aten::convolution_backward', which needs at least 1.08 GiB at once: "
    "raise the budget or shrink the batch"
)

MEASURED = {
    "step_s": 2.0,
    "ratio_to_stock": 1.0,
    "rss_peak_bytes": 900 * MIB,
    "moved_out_bytes_per_step": 0,
    "moved_in_bytes_per_step": 0,
    "losses_identical": True,
}


def table(*contenders: dict[str, Any]) -> list[str]:
    facts = {
        "title": "a model",
        "parameters": 1e6,
        "static_bytes": 100 * MIB,
        "peak_bytes": 2000 * MIB,
        "floor_bytes": 1164 * MIB,
        "floor_op": "aten::mm",
        "contenders": [{"share": None, **contender} for contender in contenders],
    }
    environment = dict.fromkeys(
        ("cpu", "cores", "system", "kernel", "spill_filesystem", "python", "torch", "threads"), "x"
    )
    results = {
        "environment": {**environment, "memory_bytes": 2**34},
        "settings": {"rounds": 2, "steps": 2, "warmup": 1},
        "models": {"model": facts},
    }
    return markdown(results).splitlines()


def row(lines: list[str], name: str) -> list[str]:
    (found,) = [line for line in lines if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_budget_below_the_floor_is_a_short_cell_with_the_whole_story_below() -> None:
    lines = table(
        {
            "key": "lowtide@0.45",
            "contender": "lowtide",
            "share": 0.45,
            "budget_bytes": 1008 * MIB,
            "failures": [REFUSED],
        }
    )
    cells = row(lines, "Lowtide, 45%")
    assert cells[1:3] == ["1,008 MiB", "below floor (1,164 MiB)"]
    assert f"Lowtide, 45%: failed: {REFUSED}" in lines


def test_other_failures_are_told_by_their_kind() -> None:
    lines = table(
        {
            "key": "lowtide@0.9",
            "contender": "lowtide",
            "share": 0.9,
            "budget_bytes": 1800 * MIB,
            "failures": [REFUSED, "SpillFull: cannot write 8 MiB: no room"],
        },
        {"key": "naive", "contender": "naive", "failures": ["killed by signal 9"]},
        {"key": "checkpoint", "contender": "checkpoint", "failures": ["a long text without any colon " * 9]},
        {"key": "kernel_swap", "contender": "kernel_swap", "skipped": "needs root to make a cgroup"},
    )
    assert row(lines, "Lowtide, 90%")[2] == "failed: BudgetTooSmall, SpillFull"
    assert row(lines, "naive hooks to disk")[2] == "failed: killed by signal 9"
    assert row(lines, "`torch.utils.checkpoint`")[2] == "failed: see below"
    assert row(lines, "kernel swap, same resident set")[2] == "skipped"
    assert "Lowtide, 90%: failed: SpillFull: cannot write 8 MiB: no room" in lines
    assert "kernel swap, same resident set: skipped: needs root to make a cgroup" in lines


def test_rounds_that_failed_beside_others_are_told_below_too() -> None:
    lines = table({"key": "stock", "contender": "stock", **MEASURED, "failures": ["killed by signal 9"]})
    assert row(lines, "stock PyTorch")[2] == "2.00 s (some rounds failed)"
    assert "stock PyTorch: failed: killed by signal 9" in lines
    assert not [line for line in table({"key": "stock", "contender": "stock", **MEASURED}) if "failed" in line]


def test_ratios_to_tcmalloc_are_taken_within_a_round() -> None:
    lines = table(
        {"key": "tcmalloc", "contender": "tcmalloc", **MEASURED, "round_ratios_to_stock": [0.5, 0.8]},
        {"key": "lowtide@0.6", "contender": "lowtide", "share": 0.6, **MEASURED, "round_ratios_to_stock": [0.6, 0.8]},
        {"key": "naive", "contender": "naive", **MEASURED, "round_ratios_to_stock": [2.0]},
    )
    assert row(lines, "Lowtide, 60%")[4] == "1.10x"
    assert row(lines, "stock PyTorch with tcmalloc")[4] == "1.00x"
    assert row(lines, "naive hooks to disk")[4] == ""  # it did not run in both rounds
