"""Trainers that own the loop: their tide ends with them, well or not, and their loggers get its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import BudgetTooSmall
from lowtide.execute.tide.fit import fit


def rows(count: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(64, generator=torch.Generator().manual_seed(number))} for number in range(count)]


class Regression(nn.Module):
    """As Trainer wants a model: keywords in, a dict with the loss out."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.net, self.fails, self.calls = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), fails, 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.fails and self.calls == 3:
            raise KeyError("mine")
        return {"loss": self.net(x).square().mean()}


def trainer(model: nn.Module, out: Path, *, budget: str | None = None, callbacks: list[Any] | None = None) -> Any:
    transformers = pytest.importorskip("transformers")
    from lowtide.integrations.huggingface import TideMixin

    class BudgetTrainer(TideMixin, transformers.Trainer):
        pass

    settings = transformers.TrainingArguments(
        str(out),
        max_steps=4,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    made: Any = transformers.Trainer if budget is None else BudgetTrainer
    own = {} if budget is None else {"budget": budget}
    return made(model, settings, train_dataset=rows(32), eval_dataset=rows(8), callbacks=callbacks, **own)


def assert_nothing_is_open() -> None:
    fit(budget="64MiB").close()  # a second tide in the process would be refused


def test_the_mixins_logs_have_lowtides_figures(tmp_path: Path) -> None:
    ours = trainer(Regression(), tmp_path, budget="64MiB")
    ours.train()
    first, *later = [entry for entry in ours.state.log_history if "loss" in entry]
    assert first["lowtide_peak_bytes"] > 0
    assert all(entry["lowtide_step_s"] > 0 for entry in later)
    assert ours.tide_session.stats()["steps"] == 4
    ours.evaluate()
    assert_nothing_is_open()


def test_a_budget_that_is_too_small_is_the_mixins_error(tmp_path: Path) -> None:
    class Large(Regression):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.net(x.repeat(4096, 1)).square().mean()}

    with pytest.raises(BudgetTooSmall):
        trainer(Large(), tmp_path, budget="1MiB").train()
    assert_nothing_is_open()


def test_a_training_that_raised_leaves_a_tide_that_the_next_one_closes(tmp_path: Path) -> None:
    from lowtide.integrations.huggingface import TideCallback

    callback = TideCallback(budget="64MiB")
    with pytest.raises(KeyError, match="mine"):
        trainer(Regression(fails=True), tmp_path, callbacks=[callback]).train()
    left = callback.tide
    assert "closed" not in repr(left)
    trainer(Regression(), tmp_path, callbacks=[callback]).train()
    assert "closed" in repr(left)
    assert callback.stats()["steps"] == 4
    assert_nothing_is_open()


@pytest.mark.parametrize("fails", [False, True])
def test_lightning_closes_its_tide_and_logs_its_figures(fails: bool, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from lowtide.integrations.lightning import TideCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Regression(fails=fails)

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Notes(lightning.pytorch.loggers.logger.DummyLogger):  # type: ignore[misc, name-defined]
        seen: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012 - one logger a test

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.seen.append((step or 0, metrics))

    notes, callback = Notes(), TideCallback(budget="64MiB")
    notes.seen = []
    ours = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        log_every_n_steps=2,
        logger=notes,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    data = torch.utils.data.DataLoader(rows(32), batch_size=8)  # type: ignore[arg-type, var-annotated]
    if fails:
        with pytest.raises(KeyError, match="mine"):
            ours.fit(Module(), data)
    else:
        ours.fit(Module(), data)
        figures = [(step, metrics) for step, metrics in notes.seen if "lowtide/step_s" in metrics]
        assert [step for step, _ in figures] == [2, 4]
    assert callback.stats()["steps"] == (2 if fails else 4)
    assert_nothing_is_open()


# ---- Lightning's checkpoints and its registry of strategies ----


def test_a_checkpoint_of_lightnings_comes_back_as_it_was_and_draws_no_random_numbers(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lowtide.integrations.lightning import TideCheckpointIO

    saved = {"state_dict": {"a": torch.randn(300, 300)}, "epoch": 3, "callbacks": {("k", 1): [None, 2.5, "x"]}}
    io = TideCheckpointIO()
    io.save_checkpoint(saved, tmp_path / "deep" / "one.ckpt")
    torch.manual_seed(7)
    found = io.load_checkpoint(tmp_path / "deep" / "one.ckpt")
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))
    assert torch.equal(found["state_dict"].pop("a"), saved["state_dict"].pop("a"))  # type: ignore[attr-defined]
    assert found == saved
    io.remove_checkpoint(tmp_path / "deep" / "one.ckpt")
    assert list((tmp_path / "deep").iterdir()) == []


def test_files_that_lightning_saved_are_loaded_and_removed(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lowtide.integrations.lightning import TideCheckpointIO

    torch.save({"epoch": 3}, tmp_path / "stock.ckpt")
    io = TideCheckpointIO()
    assert io.load_checkpoint(tmp_path / "stock.ckpt") == {"epoch": 3}
    io.remove_checkpoint(tmp_path / "stock.ckpt")
    io.remove_checkpoint(tmp_path / "stock.ckpt")  # gone already
    assert list(tmp_path.iterdir()) == []


def test_the_strategy_is_found_by_its_name_and_takes_what_is_left() -> None:
    lightning = pytest.importorskip("lightning")
    from lowtide.integrations.lightning import TideCheckpointIO, TideStrategy

    trainer = lightning.Trainer(strategy="lowtide", accelerator="cpu", logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is TideStrategy
    assert type(trainer.strategy.checkpoint_io) is TideCheckpointIO


@pytest.mark.parametrize("fails", [False, True])
def test_the_strategy_closes_its_tide_and_validates_inside_of_it(fails: bool, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from lowtide.integrations.lightning import TideStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Regression(fails=fails)

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            return self.inner(**batch)["loss"]

        def validation_step(self, batch: dict[str, Tensor], _index: int) -> None:
            assert "closed" not in repr(strategy.tide)
            self.inner.net(batch["x"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader() -> Any:
        return torch.utils.data.DataLoader(rows(32), batch_size=8)  # type: ignore[arg-type, var-annotated]

    strategy = TideStrategy(budget="64MiB")
    ours = lightning.Trainer(
        max_steps=4,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )
    if fails:
        with pytest.raises(KeyError, match="mine"):
            ours.fit(Module(), loader())
    else:
        ours.fit(Module(), loader())
        ours.validate(Module(), loader(), verbose=False)
    assert "closed" in repr(strategy.tide)
    assert_nothing_is_open()
