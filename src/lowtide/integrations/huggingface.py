"""Hugging Face's `Trainer` inside a budget.

trainer = Trainer(model, args, train_dataset=data, callbacks=[TideCallback(budget="2GiB")])

or, where a callback cannot reach (errors, logs, `evaluate` and `predict` on their own):

class BudgetTrainer(TideMixin, Trainer): ...
trainer = BudgetTrainer(model, args, train_dataset=data, budget="2GiB")
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

from transformers.trainer_callback import TrainerCallback

from lowtide.execute.tide.tide import Tide
from lowtide.integrations.session import Listener, Session, TideOptions


class TideCallback(TrainerCallback):  # type: ignore[misc]  # transformers may be absent where types are checked
    """Opens a tide when `Trainer.train` begins, and closes it when that ends; takes the keywords of `lowtide.fit`.

    Evaluation and saving between steps are inside the budget, too. After a training that raised, no event tells of its
    end: the tide is closed by the next `train`, by `close`, or at exit.
    """

    def __init__(self, *, on_step: Listener | Iterable[Listener] | None = None, **options: Unpack[TideOptions]) -> None:
        self._session = Session(on_step=on_step, **options)

    @property
    def tide(self) -> Tide:
        """The tide, once a training has begun."""
        return self._session.tide

    def stats(self) -> dict[str, object]:
        """Return `Tide.stats()`, also after the training."""
        return self._session.stats()

    def close(self) -> None:
        """Close the tide that a training which raised has left open."""
        self._session.close()

    def on_train_begin(self, *_arguments: Any, **kwargs: Any) -> None:
        """Open the tide."""
        self._session.open(kwargs.get("model"))

    def on_train_end(self, *_arguments: Any, **_kwargs: Any) -> None:
        """Close the tide."""
        self._session.close()


class TideMixin:
    """A `Trainer` that trains, evaluates and predicts inside a budget: name it before `Trainer` among the bases.

    Takes the keywords of `lowtide.fit` beside the trainer's own. A budget that is too small raises `BudgetTooSmall`;
    the tide is closed whatever happens. The trainer's logs have Lowtide's figures, so they are in TensorBoard, Weights
    & Biases or wherever `report_to` sends them.
    """

    model: Any

    def __init__(
        self,
        *args: Any,
        budget: Any,
        spill: Any = None,
        policy: Any = "auto",
        verify: bool = False,
        recompute: bool | None = None,
        on_step: Listener | Iterable[Listener] | None = None,
        **kwargs: Any,
    ) -> None:
        self.tide_session = Session(
            on_step=on_step, budget=budget, spill=spill, policy=policy, verify=verify, recompute=recompute
        )
        super().__init__(*args, **kwargs)

    @property
    def tide(self) -> Tide:
        """The tide, once there is one."""
        return self.tide_session.tide

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train inside the budget."""
        with self.tide_session.opened(self.model):
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate inside the budget, during a training or alone."""
        with self._budgeted():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict inside the budget."""
        with self._budgeted():
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def _budgeted(self) -> AbstractContextManager[object]:
        return nullcontext() if self.tide_session.is_open else self.tide_session.opened(self.model)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the last step's figures among the trainer's own."""
        records = self.tide_session.records()
        figures = {f"lowtide_{name}": value for name, value in records[-1].figures().items()} if records else {}
        super().log({**logs, **figures}, *args, **kwargs)  # type: ignore[misc]
