"""An engine for each test that asks for one, and nothing left of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.tiers.medium import Medium
from tests.memory.engine import Engine, files


@pytest.fixture(scope="session", autouse=True)
def few_objects() -> Iterator[None]:
    """Keep what was there before out of the collector's sight: each engine looks at all objects when it opens."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def opened(tmp_path: Path, few_objects: None) -> Iterator[Callable[..., Engine]]:
    """Open the process's engine, on a spill file where no media are given; at the end nothing may be left of it."""
    del few_objects
    engines: list[Engine] = []

    def open_engine(*media: Medium, **settings: Any) -> Engine:
        engines.append(Engine(*(media or (files(tmp_path),)), **settings))
        return engines[-1]

    yield open_engine
    gc.collect()
    for engine in engines:
        engine.native.stress(0, 0)
        for medium in engine.media:
            if not hasattr(medium, "fds"):
                medium.close()
        engine.close()
