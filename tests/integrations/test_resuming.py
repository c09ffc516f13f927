"""A Trainer that is interrupted and resumed under another budget ends where the uninterrupted stock run does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.slow

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
        save_steps=STEPS // 2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    tides = [] if budget is None else [TideCallback(budget=budget, spill=out)]
    trainer = transformers.Trainer(model, settings, train_dataset=rows(64), callbacks=[Stop(), *tides])
    trainer.train(resume_from_checkpoint=resume)
    return digest(model), dict(tides[0].stats()) if tides else {}


def test_an_interrupted_run_goes_on_under_another_budget(tmp_path: Path) -> None:
    expected, _ = huggingface(tmp_path / "stock", steps=STEPS, budget=None, resume=False)
    half, first = huggingface(tmp_path / "ours", steps=STEPS // 2, budget=FIRST, resume=False)
    assert half != expected
    whole, second = huggingface(tmp_path / "ours", steps=STEPS, budget=SECOND, resume=True)
    assert whole == expected
    assert first["swapped_out_bytes"] > 0, "the first budget presses"
    assert second["steps"] == STEPS - STEPS // 2
