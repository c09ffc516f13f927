"""The optimizers of PyTorch that compute with lists, with options that reach their rarer parts."""

from __future__ import annotations

from typing import Any

import torch

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamax": (torch.optim.Adamax, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw_maximize": (torch.optim.AdamW, {"maximize": True}),
    "asgd": (torch.optim.ASGD, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rprop": (torch.optim.Rprop, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
}
FUSED = ("adagrad", "adam", "adamw", "sgd")
