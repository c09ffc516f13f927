"""How verbs name a model of the zoo and a machine: shared options, checked before anything slow begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lowtide import zoo
from lowtide.core.trace import RANGE_BYTES, Reach
from lowtide.errors import BadArgument, LowtideError
from lowtide.zoo.huggingface import PREFIX

if TYPE_CHECKING:
    from lowtide.core.machine import Machine
    from lowtide.core.trace import Trace

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model that the user named, with its sizes."""

    name: str
    batch: int
    dtype: str
    sizes: dict[str, int | float | bool]


def model_options(function: F) -> F:
    """Add --model, --hf-config, --batch, --dtype and --size to a command."""
    for option in (
        click.option(
            "--size", "sizes", multiple=True, metavar="NAME=N", help="With --model: a size of it, such as layers=24."
        ),
        click.option("--dtype", default="float32", show_default=True, metavar="T", help="With --model: its precision."),
        click.option("--batch", type=int, metavar="N", help="With --model: samples in a batch; 1 if not given."),
        click.option(
            "--hf-config", type=click.Path(path_type=Path), metavar="FILE", help="A Hugging Face config.json."
        ),
        click.option("--model", metavar="NAME", help="A model by name, such as resnet50 or llama-7b (docs/zoo.md)."),
    ):
        function = option(function)
    return function


def check_model(
    model: str | None, *, hf_config: Path | None, batch: int | None, dtype: str, sizes: Sequence[str]
) -> Wanted | None:
    """Return the model that the options name, or None if they name none."""
    if model is not None and hf_config is not None:
        raise BadArgument("--model and --hf-config name a model each: pass one of them")
    if hf_config is not None:
        model = f"{PREFIX}{hf_config}"
    if model is None:
        if batch is not None or sizes:
            raise BadArgument("--batch and --size need --model NAME or --hf-config FILE")
        return None
    zoo.find(model)  # says what is wrong with the name
    if batch is not None and batch < 1:
        raise BadArgument(f"--batch {batch} is too small: pass 1 or more")
    if dtype not in zoo.DTYPES:
        raise BadArgument(f"unknown --dtype {dtype!r}: choose one of {', '.join(zoo.DTYPES)}")
    return Wanted(name=model, batch=batch or 1, dtype=dtype, sizes=dict(map(_size, sizes)))


def _size(text: str) -> tuple[str, int | float | bool]:
    name, equals, value = text.partition("=")
    if equals:
        if value.lower() in ("true", "false"):
            return name, value.lower() == "true"
        for number in (int, float):
            try:
                return name, number(value)
            except ValueError:
                continue
    raise BadArgument(f"cannot read --size {text!r}: write NAME=N, such as layers=24")


def build_trace(
    wanted: Wanted, *, fake: bool, machine: str | None, steps: int = 2, reach: Reach | None = None
) -> Trace:
    """Return the trace of a model, executed or not; `reach`: what the executor could move (None: by the machine)."""
    sizes: dict[str, Any] = dict(wanted.sizes)
    target = None if machine is None else find_machine(machine)
    if reach is None:
        reach = Reach.TOUCHED if target is None or target.moves_pages or target.addressable else Reach.SAVED
    from lowtide import capture_model
    from lowtide.capture.fake import LEAST_BYTES

    # On a host fit moves whatever has pages of its own.
    on_host = reach is Reach.TOUCHED and not (target is not None and target.addressable)
    try:
        trace = capture_model(
            wanted.name,
            batch=wanted.batch,
            fake=fake,
            machine=target,
            steps=steps,
            dtype=wanted.dtype,
            reach=reach,
            least_bytes=RANGE_BYTES if on_host else LEAST_BYTES,
            **sizes,
        )
        return replace(trace, model=wanted.name.removeprefix(PREFIX))
    except LowtideError:
        raise
    except (RuntimeError, ValueError) as error:  # what torch says of sizes that do not fit together
        reason = " ".join(str(error).split())
        raise BadArgument(f"model {wanted.name} cannot be trained with these sizes: {reason}") from error


def find_machine(name: str) -> Machine:
    """Return the machine a user names: a preset, a machine file, or "here", which 'lowtide probe' measured."""
    if name == "here":
        from lowtide.estimate.calibrate import load_machine

        found = load_machine()
        if found is None:
            raise BadArgument("this machine was not measured yet: run 'lowtide probe', or name a preset")
        return found
    if Path(name).is_file():
        from lowtide.core import serialize

        return serialize.load_machine(name)
    if "/" in name:
        raise BadArgument(f"machine file {name} does not exist: check the path, or name a preset (docs/machines.md)")
    from lowtide.estimate.presets import machine

    return machine(name)
