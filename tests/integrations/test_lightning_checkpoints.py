"""Checkpoints that Lightning and Trainer write in the middle of a training stay inside a budget that presses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

MIB = 2**20
WIDTH = 256


def test_lightning_saves_during_training_inside_the_budget(tmp_path: Path) -> None:
    library = pytest.importorskip("lightning")
    from lowtide.integrations.lightning import TideStrategy

    class Module(library.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

        def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    saved: list[int] = []

    class Save(library.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_arguments: Any) -> None:
            assert "closed" not in repr(strategy.tide)
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            saved.append(trainer.global_step)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(32, WIDTH)), batch_size=8)
    strategy = TideStrategy(budget=4 * MIB, spill=tmp_path)
    model = Module()
    library.Trainer(
        accelerator="cpu",
        max_steps=3,
        strategy=strategy,
        callbacks=[Save()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(model, data)
    stats: dict[str, Any] = dict(strategy.stats())
    assert saved == [1, 2, 3]
    assert stats["swapped_out_bytes"] > 0
    assert stats["peak_reserved_bytes"] <= 4 * MIB
    assert stats["over_budget_bytes"] == 0
    state = strategy.checkpoint_io.load_checkpoint(tmp_path / "saved.ckpt")["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
