"""Lightning inside a budget.

trainer = Trainer(callbacks=[TideCallback(budget="2GiB")])

or, with validation, testing and checkpoints inside the budget, too:

trainer = Trainer(strategy=TideStrategy(budget="2GiB"))
trainer = Trainer(strategy="lowtide")  # the budget is "auto"; once this module is imported

Checkpoints that are streamed, beside the callback as well: Trainer(plugins=[TideCheckpointIO()], ...)
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Unpack

from lowtide.checkpoint.load import load_training
from lowtide.checkpoint.random_state import random_state, set_random_state
from lowtide.checkpoint.save import save_training
from lowtide.checkpoint.training import Training
from lowtide.errors import BadArgument
from lowtide.execute.tide.tide import Tide
from lowtide.integrations.session import Listener, Session, TideOptions

try:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
except ImportError:
    try:
        from lightning_fabric.plugins import TorchCheckpointIO
        from pytorch_lightning.callbacks import Callback
        from pytorch_lightning.plugins.io import CheckpointIO
        from pytorch_lightning.strategies import SingleDeviceStrategy, StrategyRegistry
    except ImportError as error:
        raise BadArgument("Lightning is not installed: pip install lightning") from error


class TideCallback(Callback):  # type: ignore[misc]  # lightning may be absent where types are checked
    """Opens a tide when `Trainer.fit` has made its optimizers, and closes it when that ends, well or not.

    Takes the keywords of `lowtide.fit`. `log`: the trainer's loggers get the last step's figures, as often as Lightning
    logs.
    """

    def __init__(
        self,
        *,
        on_step: Listener | Iterable[Listener] | None = None,
        log: bool = True,
        **options: Unpack[TideOptions],
    ) -> None:
        self._session = Session(on_step=on_step, **options)
        self._log = log

    @property
    def tide(self) -> Tide:
        """The tide, once a training has begun."""
        return self._session.tide

    def stats(self) -> dict[str, object]:
        """Return `Tide.stats()`, also after the training."""
        return self._session.stats()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the tide."""
        self._session.open(pl_module, trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, *_arguments: Any) -> None:
        """Hand the last step's figures to the trainer's loggers."""
        records = self._session.records()
        if self._log and records and trainer.global_step % max(1, trainer.log_every_n_steps) == 0:
            figures = {f"lowtide/{name}": value for name, value in records[-1].figures().items()}
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)

    def on_fit_end(self, *_arguments: Any) -> None:
        """Close the tide."""
        self._session.close()

    def on_exception(self, *_arguments: Any) -> None:
        """Close the tide after a training that raised, Ctrl-C among others."""
        self._session.close()

    def teardown(self, *_arguments: Any, **_stage: Any) -> None:
        """Close the tide, where nothing did before."""
        self._session.close()


class TideCheckpointIO(CheckpointIO):  # type: ignore[misc]  # as above
    """Streams checkpoints as `Tide.save` does: saving needs no extra memory and is all or nothing.

    A checkpoint is a directory. Files that Lightning itself has saved are loaded, too, so a training can move to
    Lowtide; `lowtide.integrations.lightning.TideCheckpointIO().load_checkpoint(path)` reads the dict back elsewhere.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint to a directory."""
        if storage_options is not None:
            raise BadArgument("TideCheckpointIO writes to a local directory: leave storage_options out")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_training(path, Training(models=(), optimizers=(), objects={"checkpoint": checkpoint}))

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what `save_checkpoint` was given. Generators of random numbers stay as they are, as in Lightning."""
        if Path(path).is_file():
            found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
            return found
        before = random_state()
        try:
            _, values = load_training(path, Training(models=(), optimizers=()))
        finally:
            set_random_state(before)
        if "checkpoint" not in values:
            raise BadArgument(f"{path} was not saved by TideCheckpointIO: load it with lowtide.load_checkpoint")
        checkpoint: dict[str, Any] = values["checkpoint"]
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, a directory or a file."""
        if Path(path).is_dir():
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)


class TideStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # as above
    """One device, with a tide around everything that the trainer does there, and streamed checkpoints.

    Takes the keywords of `lowtide.fit` (`budget` is "auto" unless given) beside those of Lightning's
    `SingleDeviceStrategy`. A checkpoint is loaded inside the budget, and validation, testing and prediction on their
    own are inside of it, too.
    """

    strategy_name = "lowtide"

    def __init__(
        self,
        device: Any = "cpu",
        accelerator: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
        *,
        on_step: Listener | Iterable[Listener] | None = None,
        **options: Unpack[TideOptions],
    ) -> None:
        options.setdefault("budget", "auto")
        super().__init__(
            device=device,
            accelerator=accelerator,
            checkpoint_io=TideCheckpointIO() if checkpoint_io is None else checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._session = Session(on_step=on_step, **options)

    @property
    def tide(self) -> Tide:
        """The tide, once the trainer has begun."""
        return self._session.tide

    def stats(self) -> dict[str, object]:
        """Return `Tide.stats()`, also after the training."""
        return self._session.stats()

    def setup(self, trainer: Any) -> None:
        """Open the tide, with the optimizers that a training has by now."""
        super().setup(trainer)
        self._session.open(self.lightning_module, self.optimizers)

    def teardown(self) -> None:
        """Close the tide, whatever has happened."""
        self._session.close()
        super().teardown()


if TideStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        TideStrategy.strategy_name,
        TideStrategy,
        description="One device inside a memory budget; TideStrategy(budget=...) states it, else it is 'auto'",
    )
