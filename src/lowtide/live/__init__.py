"""A training while it runs: a line in the terminal, a log, loggers that people already use, a view in notebooks.

tide.on_step(to_tensorboard("runs/today"))
tide.on_step(to_wandb())
tide.on_step(to_jsonl("steps.jsonl"))
"""

from lowtide.live.jsonl import to_jsonl
from lowtide.live.loggers import to_notebook, to_tensorboard, to_wandb

__all__ = ["to_jsonl", "to_notebook", "to_tensorboard", "to_wandb"]
