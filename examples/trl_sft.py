"""Fine-tune a small Llama on chats with TRL's SFTTrainer, loss on the answers only; downloads nothing.

python examples/trl_sft.py [--budget 80MiB | --stock] [--lora]
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile

import datasets
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from lowtide.integrations.huggingface import TideCallback

WORDS = [f"word{number}" for number in range(500)]


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def chats(rows: int) -> datasets.Dataset:
    draw = random.Random(1)
    return datasets.Dataset.from_list(
        [
            {"prompt": " ".join(draw.choices(WORDS, k=24)), "completion": " " + " ".join(draw.choices(WORDS, k=40))}
            for _ in range(rows)
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="80MiB")
    parser.add_argument("--stock", action="store_true", help="train without Lowtide")
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT instead of all weights")
    arguments = parser.parse_args()

    set_seed(0)
    words = tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            max_position_embeddings=128,
            pad_token_id=words.pad_token_id,
            eos_token_id=words.eos_token_id,
        )
    )
    adapters = None
    if arguments.lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    callback = None if arguments.stock else TideCallback(budget=arguments.budget)
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(
            tempfile.mkdtemp(),
            max_steps=4,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_length=128,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=chats(64),
        processing_class=words,
        peft_config=adapters,
        callbacks=[] if callback is None else [callback],
    )
    trainer.train()
    if callback is not None:
        stats = callback.stats()
        print(f"{stats['steps']} steps, swapped out {stats['swapped_out_bytes']}, peak {stats['peak_bytes']}")
    print("parameters", digest(trainer.model))


if __name__ == "__main__":
    main()
