"""A training of Hugging Face or Lightning, resumed under another budget, ends as the stock run that never stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.core.units import parse_bytes

Run = Callable[..., tuple[str, dict[str, Any]]]

WIDTH, STEPS = 256, 6
FIRST, SECOND = "6MiB", "9MiB"  # weights and moments are 6 MiB, gradients 2


class Regression(nn.Module):
    """As Trainer wants a model; dropout draws from the generator, which a checkpoint has to bring back."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(8)]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x).square().mean()}


def rows(count: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))} for number in range(count)]


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def huggingface(out: Path, *, steps: int, budget: str | None, resume: bool) -> tuple[str, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    from lowtide.integrations.huggingface import TideCallback

    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        """The interruption: the schedule is that of the whole run."""

        def on_step_end(self, _args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    transformers.set_seed(0)
    model = Regression()
    settings = transformers.TrainingArguments(
        str(out),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        save_steps=STEPS // 3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    tides = [] if budget is None else [TideCallback(budget=budget, spill=out)]
    trainer = transformers.Trainer(model, settings, train_dataset=rows(64), callbacks=[Stop(), *tides])
    trainer.train(resume_from_checkpoint=resume)
    return digest(model), dict(tides[0].stats()) if tides else {}


def lightning(out: Path, *, steps: int, budget: str | None, resume: bool) -> tuple[str, dict[str, Any]]:
    library = pytest.importorskip("lightning")
    from lowtide.integrations.lightning import TideStrategy

    class Module(library.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

        def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    library.seed_everything(0)
    model = Module()
    data = torch.stack([row["x"] for row in rows(16)])
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)
    strategy = None if budget is None else TideStrategy(budget=budget, spill=out.parent)
    trainer = library.Trainer(
        accelerator="cpu",
        max_epochs=steps // len(batches),
        gradient_clip_val=1.0,
        strategy=strategy or "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    saved = out / "saved.ckpt"
    trainer.fit(model, batches, ckpt_path=str(saved) if resume else None)
    trainer.save_checkpoint(str(saved))
    return digest(model), dict(strategy.stats()) if strategy else {}


@pytest.mark.parametrize("run", [huggingface, lightning])
def test_an_interrupted_run_goes_on_under_another_budget(run: Run, tmp_path: Path) -> None:
    expected, _ = run(tmp_path / "stock", steps=STEPS, budget=None, resume=False)
    interrupted = STEPS // 3
    half, first = run(tmp_path / "ours", steps=interrupted, budget=FIRST, resume=False)
    assert half != expected
    whole, second = run(tmp_path / "ours", steps=STEPS, budget=SECOND, resume=True)
    assert whole == expected
    assert first["swapped_out_bytes"] > 0, "the first budget presses"
    # What is written and read for checkpoints is inside of the budgets, too.
    for stats, budget in ((first, FIRST), (second, SECOND)):
        assert stats["peak_reserved_bytes"] <= parse_bytes(budget)
        assert stats["over_budget_bytes"] == 0
    assert second["steps"] == STEPS - interrupted
