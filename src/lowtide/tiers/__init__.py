"""Where bytes live below fast memory, and how they get there and back.

spill= --open_medium--> Medium (blocking, at offsets) --ThreadStore--> Store (extents and transfers, never blocks)
"""

from __future__ import annotations

from lowtide.tiers.encoded import Encoded
from lowtide.tiers.extents import Extent, Extents
from lowtide.tiers.file import FileMedium
from lowtide.tiers.medium import ALIGN_BYTES, Engine, Files, Medium, PlainMedium
from lowtide.tiers.null import NullMedium
from lowtide.tiers.open import known_schemes, open_medium
from lowtide.tiers.slabs import Slabs
from lowtide.tiers.store import Store, ThreadStore, Transfer
from lowtide.tiers.wrappers import Direction, Fault, FaultKind, Faulty, Latency, Throttle, Wrapper

__all__ = [
    "ALIGN_BYTES",
    "Direction",
    "Encoded",
    "Engine",
    "Extent",
    "Extents",
    "Fault",
    "FaultKind",
    "Faulty",
    "FileMedium",
    "Files",
    "Latency",
    "Medium",
    "NullMedium",
    "PlainMedium",
    "Slabs",
    "Store",
    "ThreadStore",
    "Throttle",
    "Transfer",
    "Wrapper",
    "known_schemes",
    "open_medium",
]
