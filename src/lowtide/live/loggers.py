"""Steps in the loggers that people already use; each is imported only when it is asked for."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from lowtide.core.step_record import StepRecord
from lowtide.errors import BadArgument
from lowtide.live.html import steps_html

_PREFIX = "lowtide/"
_MOST_RECORDS = 240


class ToTensorBoard:
    """Draws each step's figures with a `SummaryWriter`; `close` writes out what it still holds."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, record: StepRecord) -> None:
        """Draw a step."""
        for name, value in record.figures().items():
            self._writer.add_scalar(_PREFIX + name, value, record.step)

    def close(self) -> None:
        """Close the writer. At the end of a program it closes itself."""
        self._writer.close()


def to_tensorboard(writer: Any = "runs") -> ToTensorBoard:
    """Return a listener for `tide.on_step` that draws each step's figures in TensorBoard.

    `writer`: a `SummaryWriter` that the program has already, or the directory for a new one.
    """
    if isinstance(writer, str | os.PathLike):
        try:
            tensorboard = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise BadArgument("TensorBoard is not installed: pip install tensorboard") from error
        writer = tensorboard.SummaryWriter(os.fspath(writer))

    return ToTensorBoard(writer)


def to_notebook() -> Callable[[StepRecord], None]:
    """Return a listener for `tide.on_step` that keeps a view of the last steps up to date below a notebook's cell."""
    try:
        display = import_module("IPython.display")
    except ImportError as error:
        raise BadArgument("IPython is not installed: a notebook's view is for notebooks") from error
    records: deque[StepRecord] = deque(maxlen=_MOST_RECORDS)
    shown = display.display(display.HTML(steps_html(())), display_id=True)

    def show(record: StepRecord) -> None:
        records.append(record)
        if shown is not None:  # outside of a notebook there is nothing to update
            shown.update(display.HTML(steps_html(tuple(records))))

    return show


def to_wandb(run: Any = None, *, commit: bool = False) -> Callable[[StepRecord], None]:
    """Return a listener for `tide.on_step` that logs each step's figures to Weights & Biases.

    `run`: what `wandb.init` returned (None: the run that is active). The figures have an axis of their own,
    `lowtide/step`. They are sent with the program's own next `wandb.log`, whose steps stay as they are; `commit` sends
    each step at once, for a program that logs nothing itself.
    """
    if run is None:
        try:
            wandb = import_module("wandb")
        except ImportError as error:
            raise BadArgument("Weights & Biases is not installed: pip install wandb") from error
        run = wandb.run
        if run is None:
            raise BadArgument("no run of Weights & Biases is active: call wandb.init() first")
    run.define_metric(f"{_PREFIX}step")
    run.define_metric(f"{_PREFIX}*", step_metric=f"{_PREFIX}step")

    def log(record: StepRecord) -> None:
        figures = {f"{_PREFIX}{name}": value for name, value in record.figures().items()}
        run.log({f"{_PREFIX}step": record.step, **figures}, commit=commit)

    return log
