"""Train a Lightning module with validation and checkpoints; one callback, or a strategy, for the budget.

python examples/lightning_module.py [--budget 12MiB | --stock] [--strategy] [--resume] [--out DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lowtide.integrations.lightning import TideCallback, TideStrategy


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())])

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _index: int) -> None:
        self.log("validated", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="12MiB")
    parser.add_argument("--stock", action="store_true", help="train without Lowtide")
    parser.add_argument("--strategy", action="store_true", help="a strategy instead of a callback")
    parser.add_argument("--resume", action="store_true", help="stop after the first epoch, and go on from there")
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    out = arguments.out or tempfile.mkdtemp()

    def train(epochs: int, *, resume: bool) -> nn.Module:
        lightning.seed_everything(0)
        model = Regression()
        data = DataLoader(TensorDataset(torch.randn(512 * 4, 256)), batch_size=512)
        budgeted = None
        if not arguments.stock:
            budgeted = (TideStrategy if arguments.strategy else TideCallback)(budget=arguments.budget)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            callbacks=[budgeted] if isinstance(budgeted, TideCallback) else [],
            strategy=budgeted if isinstance(budgeted, TideStrategy) else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=out,
        )
        validation = DataLoader(TensorDataset(torch.randn(512, 256)), batch_size=512)
        trainer.fit(model, data, validation, ckpt_path=f"{out}/first.ckpt" if resume else None)
        trainer.save_checkpoint(f"{out}/first.ckpt")
        if budgeted is not None:
            stats = budgeted.stats()
            print(f"{stats['steps']} steps, swapped out {stats['swapped_out_bytes']}, peak {stats['peak_bytes']}")
        return model

    if arguments.resume:
        train(1, resume=False)
    model = train(2, resume=arguments.resume)
    print("parameters", digest(model))


if __name__ == "__main__":
    main()
