"""A step as one line: what it says, and that it fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core.step_record import Expected, StepRecord, typical_slowdown
from lowtide.live.html import steps_html
from lowtide.live.line import status_line, used

RECORD = StepRecord(
    step=128,
    step_s=2.0,
    stall_s=0.08,
    recompute_s=0.0,
    budget_bytes=2 * 2**30,
    peak_bytes=int(1.87 * 2**30),
    moved_out_bytes=200 * 2**20,
    moved_in_bytes=254 * 2**20,
    planned=True,
    expected=Expected(unmanaged_s=1.6, planned_s=1.64),
)


def test_the_line_says_everything_in_80_columns() -> None:
    line = status_line(RECORD, columns=80, left_s=126.0)
    assert line == "step 128  1.87/2.00 GiB  moved 454 MiB  waited 4%  1.02x predicted  2.1 min left"
    assert len(line) == 80


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (79, "step 128  1.87/2.00 GiB  waited 4%  1.02x predicted  2.1 min left"),
        (60, "step 128  1.87/2.00 GiB  waited 4%  2.1 min left"),
        (40, "step 128  1.87/2.00 GiB  2.1 min left"),
        (23, "step 128  1.87/2.00 GiB"),
        (20, "step 128"),
        (4, "step"),
    ],
)
def test_what_matters_least_goes_first(columns: int, line: str) -> None:
    assert status_line(RECORD, columns=columns, left_s=126.0) == line


def test_what_is_not_known_is_not_told() -> None:
    line = status_line(replace(RECORD, planned=False, expected=None), columns=200)
    assert line == "step 128  1.87/2.00 GiB  moved 454 MiB  waited 4%"


@given(
    columns=st.integers(0, 120),
    step=st.integers(1, 10**9),
    nbytes=st.integers(0, 2**50),
    seconds=st.floats(0, 1e7),
)
def test_a_line_is_never_wider_than_the_terminal(columns: int, step: int, nbytes: int, seconds: float) -> None:
    record = replace(RECORD, step=step, moved_in_bytes=nbytes, peak_bytes=nbytes, step_s=seconds, stall_s=seconds)
    assert len(status_line(record, columns=columns, left_s=seconds)) <= columns


def test_bytes_are_told_in_the_unit_of_the_budget() -> None:
    assert used(900 * 2**20, 2 * 2**30) == "0.88/2.00 GiB"
    assert used(64 * 2**20, 160 * 2**20) == "64/160 MiB"


def test_slowdowns_are_against_the_step_without_a_budget() -> None:
    assert RECORD.slowdown == pytest.approx(2.0 / 1.6)
    assert RECORD.predicted_slowdown == pytest.approx(1.64 / 1.6)
    assert replace(RECORD, expected=Expected(unmanaged_s=1.6)).predicted_slowdown is None
    assert replace(RECORD, expected=None).slowdown is None


def test_one_step_that_saved_a_model_does_not_change_the_typical_slowdown() -> None:
    records = [RECORD, RECORD, replace(RECORD, step_s=60.0), replace(RECORD, expected=None)]
    assert typical_slowdown(records) == RECORD.slowdown
    assert typical_slowdown([replace(RECORD, expected=None)]) is None


def test_figures_for_loggers_are_numbers_and_leave_out_what_is_not_known() -> None:
    known = RECORD.figures()
    assert known["slowdown"] == RECORD.slowdown
    assert known["predicted_unmanaged_s"] == 1.6
    assert known["moved_out_bytes"] == 200 * 2**20
    assert all(type(value) is float for value in known.values())
    assert "slowdown" not in replace(RECORD, expected=None).figures()


def test_a_notebook_shows_the_last_step_and_a_bar_for_each() -> None:
    page = steps_html([RECORD, replace(RECORD, step=129, stall_s=5.0)], title="<Tide>")
    assert "&lt;Tide&gt;" in page
    assert "129, 2.00 s" in page
    assert "1.87/2.00 GiB" in page
    assert "1.25x of the step predicted without a budget" in page
    assert page.count("<rect") == 4
    assert 'height="64.0"' in page, "the longest step is as high as the picture"
    assert "no step has ended yet" in steps_html([])
