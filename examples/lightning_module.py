"""Train a Lightning module with validation and checkpoints; one callback for the budget.

python examples/lightning_module.py [--budget 12MiB | --stock]
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lowtide.integrations.lightning import TideCallback


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
    arguments = parser.parse_args()

    lightning.seed_everything(0)
    model = Regression()
    data = DataLoader(TensorDataset(torch.randn(512 * 4, 256)), batch_size=512, shuffle=True)
    callback = None if arguments.stock else TideCallback(budget=arguments.budget)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[] if callback is None else [callback],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(model, data, DataLoader(TensorDataset(torch.randn(512, 256)), batch_size=512))
    if callback is not None:
        stats = callback.stats()
        print(f"{stats['steps']} steps, swapped out {stats['swapped_out_bytes']}, peak {stats['peak_bytes']}")
    print("parameters", digest(model))


if __name__ == "__main__":
    main()
