"""Where memory runs out between two events of a step, what the plan lets go at the second goes before any victim."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import lowtide
from lowtide.execute.step.runtime import Runtime
from lowtide.execute.tide.tide import Tide
from lowtide.residency.schedule import StepPlan
from tests.execute.training import Need, Training


@dataclass
class Seen:
    """At which event memory first ran out, what could have left, and what was written then, all by key."""

    event: int | None = None
    could_leave: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()
    on_pressure, write = Runtime.on_pressure, Runtime._write
    inside = False

    def keys(runtime: Runtime) -> dict[int, int]:
        return {record: key for key, record in runtime.machine._by_key.items()}

    def pressed(self: Runtime, need_bytes: int) -> int:
        nonlocal inside
        if seen.event is not None:
            return on_pressure(self, need_bytes)
        self._settle()
        seen.event, inside = len(self.matcher.signature), True
        seen.could_leave = [keys(self)[record] for record in self.machine.evictable()]
        try:
            return on_pressure(self, need_bytes)
        finally:
            inside = False

    def written(self: Runtime, record: int) -> bool:
        if inside:
            seen.written.append(keys(self)[record])
        return write(self, record)

    monkeypatch.setattr(Runtime, "on_pressure", pressed)
    monkeypatch.setattr(Runtime, "_write", written)
    return seen


def follow(tide: Tide, **fields: object) -> None:
    """Follow a plan of the step that was recorded, which moves nothing but what is named."""
    signature = tide._runtime.matcher._plans[0].signature
    tide._runtime.matcher.add(replace(StepPlan(signature=signature), **fields))  # type: ignore[arg-type]


def test_what_the_plan_lets_go_at_the_next_event_goes_first(tmp_path: Path, mlp_need: Need, seen: Seen) -> None:
    stock = Training().steps(5).result()
    training = Training()
    with lowtide.fit(training.model, training.optimizer, budget=mlp_need.share(0.5), spill=tmp_path) as tide:
        training.steps(3, tide.step)
        follow(tide)
        seen.event, seen.written = None, []
        training.steps(1, tide.step)
        event, victims = seen.event, list(seen.written)
        assert event is not None
        last = seen.could_leave[-1]
        assert victims
        assert last not in victims, "chosen by age, it would be the last"
        follow(tide, leave={event: (last,)})
        seen.event, seen.written = None, []
        training.steps(1, tide.step)
        assert seen.event == event
        assert seen.written[0] == last
        assert len(seen.written) <= len(victims) + 1
    assert training.result() == stock
