"""Nested values go to JSON and come back as they were, tensors beside them."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.checkpoint.values import Tensors, decode, encode
from lowtide.errors import BadArgument


def round_trip(value: Any) -> Any:
    tensors: Tensors = {}
    coded = json.loads(json.dumps(encode(value, "top", tensors)))
    return decode(coded, tensors.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": (1, 2.5, [True, "x"]), 3: {"$": 1}},
        Counter({2: 1, 5: 3}),
        OrderedDict([("b", 1), ("a", 2)]),
        deque([1, 2]),
        {1, 2},
        b"\x00\xff",
        1e-320,
        float("inf"),
        complex(1, -2),
        torch.bfloat16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        random.getstate(),
    ],
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = round_trip(value)
    assert found == value
    assert type(found) is type(value)


def test_numpys_generator_and_scalars_come_back() -> None:
    state = round_trip(numpy.random.get_state(legacy=False))
    numpy.random.set_state(state)
    first = numpy.random.rand()
    numpy.random.set_state(state)
    assert numpy.random.rand() == first
    scalar = round_trip(numpy.float64(0.1))
    assert scalar == 0.1
    assert type(scalar) is numpy.float64


def test_tensors_are_taken_out_under_their_path() -> None:
    tensors: Tensors = {}
    encode({"state": {0: {"step": torch.ones(2)}}, "groups": [torch.zeros(1)]}, "", tensors)
    assert list(tensors) == ["state/0/step", "groups/0"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(json_values)
def test_any_nesting_comes_back(value: Any) -> None:
    assert round_trip(value) == value


def test_what_cannot_be_said_is_named() -> None:
    with pytest.raises(BadArgument, match=r"'top/hook' is a function"):
        encode({"hook": round_trip}, "top", {})
