"""Fine-tune a small GPT-2 with Hugging Face's Trainer: accumulation, evaluation, checkpoints and resuming.

python examples/huggingface_trainer.py [--budget 60MiB | --stock] [--mixin] [--lora] [--resume] [--out DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from lowtide.integrations.huggingface import TideCallback, TideMixin


class BudgetTrainer(TideMixin, Trainer):
    """A Trainer with a budget of its own."""


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def tokens(rows: int, *, seed: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(0, 1000, (rows, 64), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="60MiB")
    parser.add_argument("--stock", action="store_true", help="train without Lowtide")
    parser.add_argument("--mixin", action="store_true", help="a subclass of Trainer instead of a callback")
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT instead of all weights")
    parser.add_argument("--resume", action="store_true", help="stop after half of the steps, and go on from there")
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    out = arguments.out or tempfile.mkdtemp()

    def train(steps: int, *, resume: bool) -> nn.Module:
        set_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=192, n_layer=6, n_head=6))
        if arguments.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], lora_dropout=0.1))
        settings = TrainingArguments(
            out,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            logging_steps=1,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        data = {"train_dataset": tokens(64, seed=1), "eval_dataset": tokens(16, seed=2)}
        if arguments.mixin and not arguments.stock:
            trainer = BudgetTrainer(model, settings, **data, budget=arguments.budget)
        else:
            callbacks = [] if arguments.stock else [TideCallback(budget=arguments.budget)]
            trainer = Trainer(model, settings, **data, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        print(f"loss {[entry['loss'] for entry in trainer.state.log_history if 'loss' in entry]}")
        if not arguments.stock:
            session = trainer.tide_session if arguments.mixin else callbacks[0]
            stats = session.stats()
            print(f"{stats['steps']} steps, swapped out {stats['swapped_out_bytes']}, peak {stats['peak_bytes']}")
        return model

    if arguments.resume:
        train(2, resume=False)
    print("parameters", digest(train(4, resume=arguments.resume)))


if __name__ == "__main__":
    main()
