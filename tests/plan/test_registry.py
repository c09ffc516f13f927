from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from lowtide import registry
from lowtide.errors import BadArgument
from lowtide.plan.policies.lru import Lru


class Mine(Lru):
    name = "mine"


def install(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint(name="mine", value=value, group=registry.POLICY_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [entry] if group == entry.group else [])


@pytest.mark.parametrize("name", registry.policy_names())
def test_every_name_gives_the_policy_of_that_name(name: str) -> None:
    assert registry.policy(name).name == name


def test_the_built_in_policies_are_listed() -> None:
    assert {"auto", "belady", "keep_all", "lru", "swap_all"} <= set(registry.policy_names())


def test_an_object_is_its_own_policy_and_a_class_is_made_one() -> None:
    mine = Mine()
    assert registry.policy(mine) is mine
    assert isinstance(registry.policy(Mine), Mine)


def test_an_unknown_name_lists_the_known_ones_in_one_line() -> None:
    with pytest.raises(BadArgument) as caught:
        registry.policy("best")
    message = str(caught.value)
    assert message == f"unknown policy 'best': choose one of {', '.join(registry.policy_names())}"
    assert "\n" not in message


@pytest.mark.parametrize("thing", [3, object(), None])
def test_what_is_no_policy_is_refused(thing: object) -> None:
    with pytest.raises(BadArgument, match="is not a policy: it needs name, summary, about and plan"):
        registry.policy(thing)  # type: ignore[arg-type]


def test_a_policy_that_says_nothing_of_itself_is_refused_with_an_example() -> None:
    class Silent:
        name, summary = "silent", "says nothing of itself"

        def plan(self, problem: object) -> None: ...

    class Vague(Silent):
        about = "a paper of 2016"

    for policy in (Silent(), Vague()):
        with pytest.raises(BadArgument, match=r"`about` is a lowtide.plan.policy.About, as in About\(family="):
            registry.policy(policy)  # type: ignore[arg-type]


def test_an_installed_policy_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "thirdparty", sys.modules[__name__])
    install(monkeypatch, "thirdparty:Mine")
    assert "mine" in registry.policy_names()
    assert isinstance(registry.policy("mine"), Mine)


def test_an_installed_policy_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "lowtide_no_such_module:Policy")
    with pytest.raises(BadArgument, match=r"policy 'mine' \(lowtide_no_such_module:Policy\) does not load: No module"):
        registry.policy("mine")


def test_the_planner_never_imports_torch() -> None:
    code = (
        "import sys, lowtide.registry as r, lowtide.plan.verify, lowtide.core.serialize, lowtide.testing.traces\n"
        "[r.policy(n) for n in r.policy_names()]\n"
        "sys.exit('torch' in sys.modules or 'hypothesis' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
