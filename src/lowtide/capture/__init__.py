"""From a training step to a `Trace`: the log of a step, run for real or on tensors without data, and its reading."""

from __future__ import annotations

from lowtide.capture.training import Training

__all__ = ["Training"]
