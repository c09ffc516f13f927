"""Agents that turn the knobs: a small network in numpy, saved ones of stable-baselines3, and how to train those.

The package has one agent (`agent.npz`), which needs nothing but numpy. Training, and agents that a user has trained and
saved (`policy="deeptm:agent.zip"`), need the extra `rl`, which is loaded late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lowtide.core.plan import Problem
from lowtide.errors import BadArgument
from lowtide.plan.rl.game import ACTIONS, OBSERVED, Game

PACKAGED = Path(__file__).with_name("agent.npz")
_LAYERS = ("mlp_extractor.policy_net.0", "mlp_extractor.policy_net.2", "action_net")


class Agent(Protocol):
    """Decides how to turn the knobs."""

    def act(self, observation: Sequence[float]) -> list[float]:
        """Return an action for an observation."""
        ...


class Still:
    """Turns nothing: the strategy as it is made."""

    def act(self, observation: Sequence[float]) -> list[float]:  # noqa: ARG002 - whatever it sees
        """Return the action that changes nothing."""
        return [0.0] * ACTIONS


class Network:
    """Two hidden layers of tanh, from a file of arrays."""

    def __init__(self, path: Path = PACKAGED) -> None:
        with np.load(path) as arrays:
            self._layers = [(arrays[f"{name}.weight"], arrays[f"{name}.bias"]) for name in _LAYERS]

    def act(self, observation: Sequence[float]) -> list[float]:
        """Return the mean action."""
        values = np.asarray(observation, dtype=np.float32)
        for weight, bias in self._layers[:-1]:
            values = np.tanh(weight @ values + bias)
        weight, bias = self._layers[-1]
        action: list[float] = np.clip(weight @ values + bias, -1.0, 1.0).tolist()
        return action


class Saved:
    """An agent that stable-baselines3 has saved."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise BadArgument(f"agent {path} does not exist: train one with benchmarks/train_deeptm.py")
        self._model = _extra("stable_baselines3").PPO.load(path, device="cpu")

    def act(self, observation: Sequence[float]) -> list[float]:
        """Return the action without exploration."""
        action, _ = self._model.predict(np.asarray(observation, dtype=np.float32), deterministic=True)
        return [float(turn) for turn in np.clip(action, -1.0, 1.0)]


def _extra(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise BadArgument(
            f"agents other than the package's own need {name}: install it with "
            "pip install 'lowtide[rl]' -c constraints.txt"
        ) from None


def environment(problems: Sequence[Problem], *, seed: int = 0) -> Any:
    """Return a Gymnasium environment whose every episode is a game over one of the problems."""
    gymnasium = _extra("gymnasium")
    games = [Game(problem) for problem in problems]

    class Placement(gymnasium.Env):  # type: ignore[misc, name-defined]
        """Turn the knobs of a strategy for slow memory (lowtide/plan/rl/game.py)."""

        observation_space = gymnasium.spaces.Box(-1.0, 8.0, (OBSERVED,), np.float32)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)

        def __init__(self) -> None:
            self._draw = np.random.default_rng(seed)
            self._game = games[0]

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed, options=options)
            self._game = games[int(self._draw.integers(len(games)))]
            return np.asarray(self._game.reset(), dtype=np.float32), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            seen, reward, over = self._game.step([float(turn) for turn in action])
            return np.asarray(seen, dtype=np.float32), reward, over, False, {}

    return Placement()


def train(
    problems: Sequence[Problem],
    *,
    rounds: int,
    seed: int = 0,
    watch: Callable[[int, float], None] | None = None,
) -> Any:
    """Return an agent of stable-baselines3 (PPO) that has played so many rounds.

    `watch` is told the rounds played and the mean reward of an episode, after each update.
    """
    sb3 = _extra("stable_baselines3")
    callbacks = _extra("stable_baselines3.common.callbacks")

    class Watch(callbacks.BaseCallback):  # type: ignore[misc, name-defined]
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            episodes = [episode["r"] for episode in self.model.ep_info_buffer]
            if watch is not None and episodes:
                watch(self.num_timesteps, sum(episodes) / len(episodes))

    model = sb3.PPO(
        "MlpPolicy",
        environment(problems, seed=seed),
        n_steps=240,
        batch_size=60,
        gamma=0.95,
        ent_coef=0.003,
        seed=seed,
        device="cpu",
        policy_kwargs={"net_arch": [32, 32]},
    )
    model.learn(total_timesteps=rounds, callback=Watch())
    return model


def export(model: Any, path: Path) -> None:
    """Save the network of a trained agent as arrays that `Network` reads."""
    state = model.policy.state_dict()
    arrays = {f"{name}.{part}": state[f"{name}.{part}"].numpy() for name in _LAYERS for part in ("weight", "bias")}
    np.savez_compressed(path, **arrays)
