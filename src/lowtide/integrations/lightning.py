"""Lightning inside a budget.

trainer = Trainer(callbacks=[TideCallback(budget="2GiB")])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from lowtide.errors import BadArgument
from lowtide.execute.tide.tide import Tide
from lowtide.integrations.session import Listener, Session, TideOptions

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
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
