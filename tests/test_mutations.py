"""The audit's list is about the package as it is: every mutation can be applied, and names tests that exist."""

from __future__ import annotations

import ast

import pytest

from tests.mutations import MUTATIONS, PACKAGE, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.system}: {one.claim}")
def test_a_mutation_changes_one_place_into_python_that_can_be_read(mutation: Mutation) -> None:
    text = (PACKAGE / mutation.file).read_text()
    changed = mutation.applied(text)
    assert changed != text
    ast.parse(changed)
    assert mutation.tests
    assert all((ROOT / test.partition("::")[0]).is_file() for test in mutation.tests)


def test_no_mutation_is_listed_twice() -> None:
    assert len({(one.file, one.old, one.new) for one in MUTATIONS}) == len(MUTATIONS)
