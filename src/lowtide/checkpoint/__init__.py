"""Checkpoints: a training's state on disk, streamed there and back, whole or not at all."""
