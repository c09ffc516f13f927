"""What a training's state consists of, and how it goes back into the objects that it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from lowtide.checkpoint.random_state import random_state
from lowtide.errors import BadArgument, CheckpointMismatch

Make = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Models and optimizers in a fixed order; `objects` by name: whatever else has a state, and plain values.

    `steps` were done so far. `gradients`: those that are there are part of the state.
    """

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    objects: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0
    gradients: bool = False

    def state(self) -> dict[str, Any]:
        """Return all of it; the tensors are the live ones."""
        return {
            "steps": self.steps,
            "models": [model_state(model) for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "gradients": [_gradients(model) for model in self.models] if self.gradients else [],
            "random": random_state(),
            "objects": {name: _state_of(name, value) for name, value in self.objects.items() if value is not None},
        }


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return the tensors and the extra state of a model by name: its state dict, and buffers that this leaves out."""
    state: dict[str, Any] = dict(model.state_dict())
    own = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() and storage_of(value) not in own:
            raise BadArgument(
                f"state_dict() of {type(model).__name__} returns a copy of '{name}', not the tensor itself: save it "
                "with the wrapper that makes the copy"
            )
    for name, buffer in model.named_buffers(remove_duplicate=False):
        state.setdefault(name, buffer.detach())
    return state


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from others while it lives, without asking for its address."""
    return int(tensor.untyped_storage()._cdata)


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _state_of(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, torch.nn.Module):
        return {"model": model_state(value)}
    if isinstance(value, torch.Generator):
        return {"generator": value.get_state()}
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return {"state": value.state_dict()}
    if isinstance(value, bool | int | float | str | bytes | torch.Tensor | list | tuple | dict):
        return {"value": value}
    raise BadArgument(
        f"{name}={type(value).__name__}(...) has no state_dict() and load_state_dict(): its state cannot be saved; "
        "pass one that has, or None"
    )


# ---- the way back ----

# Settings that learning-rate schedulers add to an optimizer's groups.
_OF_SCHEDULERS = ("initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")


def check_model(name: str, model: torch.nn.Module, saved: Mapping[str, Any], specs: Mapping[str, Any]) -> None:
    """Raise `CheckpointMismatch` unless a saved state is this model's; `specs`: shape and type by tensor name."""
    own = model_state(model)
    troubles = [
        _listed("not in the checkpoint", [key for key in own if key not in saved]),
        _listed("only in the checkpoint", [key for key in saved if key not in own]),
        _listed(
            "of another shape or type",
            [
                f"{key} ({_text(*specs[saved[key]['of']])} there, {_text(value.shape, dtype_name(value))} here)"
                for key, value in own.items()
                if isinstance(value, torch.Tensor)
                and key in saved
                and specs[saved[key]["of"]] != (tuple(value.shape), dtype_name(value))
            ],
        ),
    ]
    troubles = [trouble for trouble in troubles if trouble]
    if troubles:
        raise CheckpointMismatch(
            f"the checkpoint's {name} is not this {type(model).__name__}: {'; '.join(troubles)}. Nothing was loaded"
        )


def check_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise `CheckpointMismatch` unless a saved state has this optimizer's groups of parameters and its settings."""
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    kind = type(optimizer).__name__
    if theirs != ours:
        raise CheckpointMismatch(
            f"the checkpoint's {name} has groups of {theirs} parameters, this {kind} of {ours}. Nothing was loaded"
        )
    # One of another version of PyTorch may have more settings, or fewer; one of another kind has others.
    own = {*optimizer.defaults, "params", *_OF_SCHEDULERS}
    for group in saved["param_groups"]:
        unknown, lacking = set(group) - own, set(optimizer.defaults) - set(group)
        if unknown and lacking:
            raise CheckpointMismatch(
                f"the checkpoint's {name} is not this {kind}: it has {', '.join(sorted(unknown))} and lacks "
                f"{', '.join(sorted(lacking))}. Nothing was loaded"
            )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer its state, with the types that it had: `load_state_dict` casts it to the parameters'."""
    tensors = {number: dict(one) for number, one in state["state"].items()}
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in tensors.get(number, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def load_object(target: Any, state: Mapping[str, Any]) -> Any:
    """Give an object its state, and return the value of one that is plain."""
    if "value" in state:
        return state["value"]
    if "generator" in state:
        target.set_state(state["generator"])
    else:
        target.load_state_dict(state["state"])
    return target


def _takes(target: Any, state: Mapping[str, Any]) -> bool:
    if "model" in state or isinstance(target, torch.nn.Module):
        return "model" in state and isinstance(target, torch.nn.Module)
    if "generator" in state or isinstance(target, torch.Generator):
        return "generator" in state and isinstance(target, torch.Generator)
    return hasattr(target, "load_state_dict")


def check_objects(objects: Mapping[str, Any], saved: Mapping[str, Any], *, all_wanted: bool) -> None:
    """Raise `CheckpointMismatch` if an object has no saved state or another kind's, or a saved state no object."""
    missing = [name for name, value in objects.items() if value is not None and name not in saved]
    if missing:
        raise CheckpointMismatch(f"the checkpoint has no state for {', '.join(missing)}. Nothing was loaded")
    for name, target in objects.items():
        if target is not None and "value" not in saved[name] and not _takes(target, saved[name]):
            raise CheckpointMismatch(
                f"the checkpoint's '{name}' is not the state of a {type(target).__name__}. Nothing was loaded"
            )
    wanting = [name for name, state in saved.items() if "value" not in state and name not in objects]
    if wanting and all_wanted:
        example = ", ".join(f"{name}=..." for name in wanting)
        raise CheckpointMismatch(
            f"the checkpoint holds the state of {', '.join(wanting)}: pass {example}, or None to ignore it. "
            "Nothing was loaded"
        )


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's type, as manifests have it."""
    return str(tensor.dtype).removeprefix("torch.")


def _text(shape: Sequence[int], dtype: str) -> str:
    return f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}: {', '.join(islice(names, 3))}{more}"
