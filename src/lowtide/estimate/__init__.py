"""What things cost: `calibrate` measures this machine; everything else works from its figures and needs no torch."""

from __future__ import annotations
