"""What things cost: `calibrate` measures this machine; everything else works from figures and needs no torch.

from lowtide.estimate import machine, retime
trace = retime(trace, machine("v100"))
"""

from __future__ import annotations

from lowtide.estimate.predict import Shares, fit_shares, retime
from lowtide.estimate.predictors.allocators import reserved_peak, stream_of
from lowtide.estimate.predictors.overlap import Stage, best_chunks, pipeline_s
from lowtide.estimate.presets import PRESETS, machine

__all__ = [
    "PRESETS",
    "Shares",
    "Stage",
    "best_chunks",
    "fit_shares",
    "machine",
    "pipeline_s",
    "reserved_peak",
    "retime",
    "stream_of",
]
