"""What the residency machine is told, and what it answers: frozen values, no torch.

A record is a storage that autograd saved (hooks), or a range of pages. The docstrings say the first; what an event or a
command means for a range is said after "Range:", where it is not the same.
"""

from __future__ import annotations

from dataclasses import dataclass

# ---- events ----


@dataclass(frozen=True, slots=True)
class Saved:
    """Autograd saved a storage that was not a record yet.

    Range: it was mapped, or taken over from another allocator; its pages are in fast memory and no tier has them.
    """

    record: int
    nbytes: int
    key: int


@dataclass(frozen=True, slots=True)
class Named:
    """Autograd saved a record that was held without a save of the step's before: this is its key."""

    record: int
    key: int


@dataclass(frozen=True, slots=True)
class Found:
    """Range: a tier has held its bytes since before the step, at `place`; `away`: no page of it is in fast memory."""

    record: int
    place: str
    away: bool


@dataclass(frozen=True, slots=True)
class Sole:
    """Only Lowtide holds the record's storage any more: giving it up frees memory.

    Range: never told, since its pages can leave no matter what holds the storage.
    """

    record: int


@dataclass(frozen=True, slots=True)
class Needed:
    """Autograd asks for the record now; it is pinned until `Used`.

    Range: an operator that touches it is about to begin, or a fault waits for it. All of its pages have to be there.
    """

    record: int


@dataclass(frozen=True, slots=True)
class Used:
    """The record was handed to autograd.

    Range: the operator has ended, or the fault was served. `wrote`: some of its pages may have changed (the first write
    to a page that came back faults), so that no copy in a tier is worth anything any more. What autograd was handed may
    always change.
    """

    record: int
    wrote: bool = True


@dataclass(frozen=True, slots=True)
class ChangedInPlace:
    """Range: an operator wrote it where it is away, in slow memory that it reaches: no other copy is worth anything."""

    record: int


@dataclass(frozen=True, slots=True)
class Due:
    """The plan wants these keys on their way back."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """The plan wants these keys gone again, once no other code holds them; `discard`: without a copy.

    Range: gone now, or once no operator uses it; to `place`, a tier and codec ("": where it went last). If an unchanged
    copy is there already, its pages are given up without a write.
    """

    keys: tuple[int, ...]
    discard: bool = False
    place: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    """The plan wants these keys given up without a copy, to be made again when they are needed."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unmakeable:
    """A record that was to be given up without a copy could not be made again: it is written instead."""

    record: int


@dataclass(frozen=True, slots=True)
class Remade:
    """A record that had been discarded was made again."""

    record: int


@dataclass(frozen=True, slots=True)
class Written:
    """A write landed; `resident`: the bytes were kept in fast memory too."""

    record: int
    resident: bool


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A write failed: the record stays where it is and is not tried again (R4)."""

    record: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A read ended well."""

    record: int


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A read failed: the record is still away."""

    record: int


@dataclass(frozen=True, slots=True)
class Released:
    """The backend gave up a clean record's fast bytes."""

    record: int


@dataclass(frozen=True, slots=True)
class Held:
    """The backend could not move the record: the program holds it again."""

    record: int


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A prefetch found no room; it is tried again at the next event."""

    record: int


@dataclass(frozen=True, slots=True)
class Gone:
    """Autograd let go of the record.

    Range: it was unmapped, with all copies of it.
    """

    record: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """An allocation lacks `need_bytes`."""

    need_bytes: int


Event = (
    Saved
    | Named
    | Found
    | Sole
    | Needed
    | Used
    | ChangedInPlace
    | Due
    | Leave
    | Forget
    | Unmakeable
    | Remade
    | Written
    | WriteFailed
    | Arrived
    | ReadFailed
    | Released
    | Held
    | NoRoom
    | Gone
    | Pressure
)


# ---- commands ----


@dataclass(frozen=True, slots=True)
class Write:
    """Copy the record to the tier and give up its fast bytes once that landed.

    Range: map its pages read-only, write them from where they are, then move them into the pool.
    """

    record: int


@dataclass(frozen=True, slots=True)
class Keep:
    """The record is leaving but wanted: keep its fast bytes when the write lands."""

    record: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give up a clean record's fast bytes now.

    Range: move its pages into the pool; the range stays reserved, without access.
    """

    record: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Give up the record's fast bytes now, without a copy: it is made again when it is needed."""

    record: int


@dataclass(frozen=True, slots=True)
class Remake:
    """Run the operators again that make the record, and wait for it."""

    record: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start to bring the record back if there is room right now."""

    record: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the record back, making room if necessary, and wait for it."""

    record: int


@dataclass(frozen=True, slots=True)
class Watch:
    """Report `Sole` when no other code holds the record any more."""

    record: int


Command = Write | Keep | Release | Discard | Remake | Prefetch | Fetch | Watch
