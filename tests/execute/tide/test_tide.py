"""What a user holds: a tide that shows what it is, and that stays closed once it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument


def test_a_tide_shows_its_budget_its_peak_and_where_it_spills(tmp_path: Path) -> None:
    with lowtide.fit(budget="1GiB", spill=tmp_path, policy="lru") as tide:
        assert repr(tide).startswith("<Tide: budget 1.00 GiB, policy lru, 0 steps, peak ")
        assert repr(tide).endswith(f", spill to {tmp_path}>")
        with tide.step():
            torch.ones(64 << 18, requires_grad=True).sigmoid().sum().backward()
        stats: dict[str, Any] = tide.stats()
        peak = format_bytes(stats["peak_bytes"])
        assert repr(tide) == f"<Tide: budget 1.00 GiB, policy lru, 1 step, peak {peak}, spill to {tmp_path}>"
        assert stats["peak_bytes"] >= 128 << 20
    assert repr(tide) == "<Tide: budget 1.00 GiB, policy lru, 1 step, closed>"


def test_a_closed_tide_is_not_entered_again(tmp_path: Path) -> None:
    tide = lowtide.fit(budget="1GiB", spill=tmp_path)
    with tide:
        pass
    with pytest.raises(BadArgument, match="this tide is closed: open a new one"):
        with tide:
            raise AssertionError("it was entered")
    with pytest.raises(BadArgument, match="this tide is closed: open a new one"):
        with tide.step():
            raise AssertionError("it was entered")
    tide.close()


def test_an_enforced_budget_is_never_passed(tmp_path: Path) -> None:
    with lowtide.fit(budget="1GiB", spill=tmp_path) as tide:
        with tide.step():
            torch.ones(1 << 18, requires_grad=True).sigmoid().sum().backward()
        stats = tide.stats()
    assert stats["budget_exact"] is True
    assert stats["over_budget_bytes"] == 0
