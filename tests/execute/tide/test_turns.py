"""Where a step of a program with several optimizers ends."""

from __future__ import annotations

import pytest

from lowtide.execute.tide.turns import Turn, Turns

OPTIMIZERS = {name: object() for name in "ABC"}


def steps(stepped: str) -> list[str]:
    """Return the optimizers' steps, one word for each step of the program; a star is where an iteration begins."""
    turns, words = Turns(), [""]
    for name in stepped:
        turn = turns.take(OPTIMIZERS[name])
        words[-1] += "*" * turn.begins + name
        if turn.ends:
            words.append("")
    return [word for word in words if word]


@pytest.mark.parametrize(
    ("stepped", "expected"),
    [
        ("AAA", "*A *A *A"),
        ("ABABABAB", "*A B *A B *AB *AB"),
        ("ABCABCABCABC", "*A B C *A B C *ABC *ABC"),
        # An optimizer that now and then steps more often, as the critic of some GANs: no iteration is like the last.
        ("AABAABAAB", "*A *A B *A *A B *A *A B"),
        ("AAAABAAAAB", "*A *A *A *A B *A *A *A *A B"),
        # One turn is left out, as a GradScaler does: the iterations go on with the same optimizer.
        ("ABABABBABABAB", "*A B *A B *AB *B *A B *A B *AB"),
        ("ABABABAABABAB", "*A B *A B *AB *A*A B *A B *AB"),
        # One stops, and one begins.
        ("ABABABAAA", "*A B *A B *AB *A*A *A"),
        ("AAABABABAB", "*A *A *A B *A B *AB *AB"),
    ],
)
def test_steps_end_with_the_last_of_the_optimizers_that_take_turns(stepped: str, expected: str) -> None:
    assert steps(stepped) == expected.split()


def test_the_first_step_ends_at_once() -> None:
    assert Turns().take(object()) == Turn(begins=True, ends=True)
