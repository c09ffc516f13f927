"""What codecs cost a training on this machine."""

from __future__ import annotations

import os

import pytest
import torch

from lowtide.execute.tide.encoding import codec_drag


def test_a_codec_holds_operators_up_where_their_threads_take_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert codec_drag() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    assert codec_drag() == 0
