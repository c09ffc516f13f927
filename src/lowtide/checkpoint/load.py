"""Loading: a state is checked as a whole first, then streamed into the objects that it belongs to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lowtide.checkpoint.manifest import Entry, Manifest, read_manifest
from lowtide.checkpoint.random_state import set_random_state
from lowtide.checkpoint.shard import PIECE_BYTES, ShardReader, damaged, digest_of
from lowtide.checkpoint.tensor_bytes import to_fill
from lowtide.checkpoint.training import (
    Training,
    check_model,
    check_objects,
    check_optimizer,
    load_object,
    load_optimizer,
    model_state,
)
from lowtide.checkpoint.values import decode
from lowtide.errors import CheckpointMismatch


def load_training(path: str | os.PathLike[str], training: Training) -> tuple[int, dict[str, Any]]:
    """Give a training the state of a directory; return its steps and plain values by name.

    One that has no optimizers takes no more than its models and the objects it names.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    _check(training, manifest)
    with _files(directory, manifest) as files:
        _check_bytes(files, manifest)
        return _Loading(files, manifest).run(training)


class _Loading:
    """One load, once everything was found to fit and whole."""

    def __init__(self, files: Mapping[str, ShardReader], manifest: Manifest) -> None:
        self._files = files
        self._manifest = manifest

    def run(self, training: Training) -> tuple[int, dict[str, Any]]:
        """Give everything its state."""
        values = self._manifest.values
        for model, saved in zip(training.models, values["models"], strict=True):
            self._fill_model(model, saved)
        for optimizer, saved in zip(training.optimizers, values["optimizers"], strict=False):
            load_optimizer(optimizer, self._decoded(saved))
        for index, model in enumerate(training.models):
            gradients = self._decoded(values["gradients"][index]) if values["gradients"] else {}
            for name, parameter in model.named_parameters():
                parameter.grad = gradients.get(name)
        found: dict[str, Any] = {}
        for name, saved in values["objects"].items():
            target = training.objects.get(name)
            if "model" in saved and isinstance(target, torch.nn.Module):
                self._fill_model(target, saved["model"])
            elif "value" in saved or target is not None:
                found[name] = load_object(target, self._decoded(saved))
        if _is_whole(training, self._manifest):
            set_random_state(self._decoded(values["random"]))
        return values["steps"], found

    def _decoded(self, coded: Any) -> Any:
        return decode(coded, self._tensor)

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self._manifest.tensors[name]
        tensor = torch.empty_strided(entry.shape, entry.stride, dtype=getattr(torch, entry.dtype))
        self._fill(tensor, entry)
        return tensor

    def _fill(self, tensor: torch.Tensor, entry: Entry) -> None:
        file = self._files[entry.file]
        with to_fill(tensor) as into:
            digest = digest_of(file.pieces(file.tensors[entry.key], into))
        if digest != entry.digest:
            raise damaged(file.path, f"'{entry.key}' changed while it was loaded")

    def _fill_model(self, model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
        extra = {}
        for name, value in model_state(model).items():
            if isinstance(value, torch.Tensor):
                self._fill(value, self._manifest.tensors[saved[name]["of"]])
            else:
                extra[name] = self._decoded(saved[name])
        if extra:
            model.load_state_dict(extra, strict=False)


def _check(training: Training, manifest: Manifest) -> None:
    values = manifest.values
    whole = _is_whole(training, manifest)
    for kind, given in (("models", training.models), ("optimizers", training.optimizers)):
        if len(values[kind]) != len(given) and (whole or kind == "models"):
            raise CheckpointMismatch(
                f"the checkpoint holds {len(values[kind])} {kind}, this training has {len(given)}. Nothing was loaded"
            )
    check_objects(training.objects, values["objects"], all_wanted=whole)
    specs = {name: (entry.shape, entry.dtype) for name, entry in manifest.tensors.items()}
    for index, (model, saved) in enumerate(zip(training.models, values["models"], strict=True)):
        check_model("model" if len(training.models) == 1 else f"model {index}", model, saved, specs)
    for index, (optimizer, saved) in enumerate(zip(training.optimizers, values["optimizers"], strict=False)):
        check_optimizer("optimizer" if len(training.optimizers) == 1 else f"optimizer {index}", optimizer, saved)
    for name, saved in values["objects"].items():
        target = training.objects.get(name)
        if isinstance(target, torch.nn.Module) and "model" in saved:
            check_model(name, target, saved["model"], specs)


def _is_whole(training: Training, manifest: Manifest) -> bool:
    return bool(training.optimizers) or not manifest.values["optimizers"]


@contextmanager
def _files(directory: Path, manifest: Manifest) -> Iterator[Mapping[str, ShardReader]]:
    files: dict[str, ShardReader] = {}
    try:
        for name, nbytes in manifest.files.items():
            files[name] = ShardReader(directory / name)
            if files[name].nbytes != nbytes:
                raise damaged(directory / name, f"it has {files[name].nbytes} bytes of {nbytes}")
        yield files
    finally:
        for file in files.values():
            file.close()


def _check_bytes(files: Mapping[str, ShardReader], manifest: Manifest) -> None:
    """Read everything once before anything is changed."""
    scratch = memoryview(bytearray(PIECE_BYTES))
    for entry in {(entry.file, entry.key): entry for entry in manifest.tensors.values()}.values():
        file = files[entry.file]
        stored = file.tensors.get(entry.key)
        if stored is None or stored.nbytes != entry.nbytes:
            raise damaged(file.path, f"'{entry.key}' is not in it as it was saved")
        if digest_of(file.pieces(stored, scratch)) != entry.digest:
            raise damaged(file.path, f"the bytes of '{entry.key}' differ from the saved ones")
