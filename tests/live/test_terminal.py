"""The last row of a terminal: the program above it prints as if nothing were there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.live.status import LiveLine
from lowtide.live.terminal import LastRow, is_terminal
from tests.live.screens import Screen
from tests.live.test_line import RECORD


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    made.close()


def test_the_status_is_in_the_last_row_and_output_above_it(screen: Screen) -> None:
    row = LastRow(screen.descriptor)
    screen.write("one\r\ntwo\r\n")
    row.show("step 1")
    screen.write("three\r\n")
    row.show("step 2")
    rows = screen.rows()
    assert rows[:3] == ["one", "two", "three"]
    assert rows[-1] == "step 2"
    row.close()
    screen.write("four\r\n")
    rows = screen.rows()
    assert rows[:4] == ["one", "two", "three", "four"]
    assert rows[-1] == "", "the row was given back"


def test_output_scrolls_above_the_row_and_uses_all_rows_afterwards(screen: Screen) -> None:
    row = LastRow(screen.descriptor)
    for number in range(40):
        screen.write(f"line {number}\r\n")
        row.show(f"step {number}")
    rows = screen.rows()
    assert rows[-1] == "step 39"
    assert rows[:-2] == [f"line {number}" for number in range(18, 40)], "the row above is where the program writes next"
    row.close()
    for number in range(40, 70):
        screen.write(f"line {number}\r\n")
    assert screen.rows()[:-1] == [f"line {number}" for number in range(47, 70)]


def test_a_line_that_is_not_finished_goes_on_where_it_was(screen: Screen) -> None:
    for _ in range(23):
        screen.write("above\r\n")
    screen.write("epoch 1: ")  # the cursor is in the very row that is about to be taken
    row = LastRow(screen.descriptor)
    row.show("step 1")
    screen.write("loss 0.4")
    row.show("step 2")
    row.close()
    screen.write(", done")
    assert [text for text in screen.rows() if text and text != "above"] == ["epoch 1: loss 0.4, done"]


def test_a_resized_terminal_has_the_status_in_its_new_last_row(screen: Screen) -> None:
    row = LastRow(screen.descriptor)
    row.show("step 1")
    screen.rows()
    screen.resize(columns=60, rows=30)
    row.show("step 2")
    rows = screen.rows()
    assert rows[29] == "step 2"
    assert "step 1" not in rows
    assert row.columns == 59


def test_a_terminal_of_a_few_rows_is_left_alone(screen: Screen) -> None:
    screen.resize(columns=80, rows=4)
    LastRow(screen.descriptor).show("step 1")
    assert not any(screen.rows())


# Of widths and a number that never add up to a whole row: whether a terminal that restores its cursor remembers that
# the next character wraps is up to the terminal.
MOST = 38
PRINTED = ["a\r\n", "bb", "ccc\r\n\r\n", "\rdd", "e" * 161, "\x1b[1mbold\x1b[0m\r\n"]


@settings(deadline=None, max_examples=40)
@given(
    printed=st.lists(st.sampled_from(PRINTED), max_size=MOST),
    shown=st.lists(st.booleans(), min_size=MOST, max_size=MOST),
)
def test_what_a_program_prints_is_on_the_screen_as_without_the_row(printed: list[str], shown: list[bool]) -> None:
    plain, ours = Screen(rows=12), Screen(rows=13)
    try:
        row = LastRow(ours.descriptor)
        for number, text in enumerate(printed):
            plain.write(text)
            ours.write(text)
            if number == 0 or shown[number]:
                row.show(f"step {number}")
        if printed:
            assert ours.rows()[:12] == plain.rows(), "the rows above are a terminal with one row less"
    finally:
        plain.close()
        ours.close()


def test_a_pipe_or_a_dumb_terminal_has_no_last_row(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert is_terminal(screen.descriptor)
    reader, writer = os.pipe()
    assert not is_terminal(writer)
    os.close(reader)
    os.close(writer)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(screen.descriptor)


def test_a_terminal_that_is_gone_does_not_end_a_training(screen: Screen) -> None:
    gone = os.dup(screen.descriptor)
    row = LastRow(gone)
    row.show("step 1")
    os.close(gone)
    row.show("step 2")
    row.close()


def test_quick_steps_are_shown_some_times_a_second(screen: Screen) -> None:
    now = 0.0
    line = LiveLine(LastRow(screen.descriptor), clock=lambda: now)
    seen = []
    for step in range(1, 101):
        line(replace(RECORD, step=step))
        now += 0.01
        seen.append(screen.rows()[-1].split("  ")[0])
    assert len(set(seen)) == 10
    assert seen[0] == "step 1"
    line.close()
    assert screen.rows()[-1] == ""


def test_only_the_process_that_has_the_terminal_shows_anything(screen: Screen) -> None:
    line = LiveLine(LastRow(screen.descriptor), may_show=lambda: False)
    line(RECORD)
    assert not any(screen.rows())
