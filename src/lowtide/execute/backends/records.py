"""A saved storage as every Python backend sees it: its holders, its place, and the packs that lead to it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from lowtide.core.units import format_bytes
from lowtide.errors import SpillCorrupted, SpillError
from lowtide.residency.machine import Residence

# Builds of torch before 2.8 have it only with CUDA.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)

can_count_holders = _use_count is not None
"""Whether this torch reports the holders of a storage; without that nothing may move."""


class SavedStorage:
    """A storage that autograd saved. `storage` is torch's one Python object for it (None: it is not in fast memory).

    `wanted`: asked for while leaving, so it stays when the write lands. `handed_out`: since it was last written.
    """

    def __init__(self, number: int, storage: torch.UntypedStorage) -> None:
        self.number = number
        self.storage: torch.UntypedStorage | None = storage
        self.cdata: int = storage._cdata
        self.nbytes = storage.nbytes()
        self.state = Residence.RESIDENT
        self.wanted = False
        self.handed_out = False

    def is_alone(self) -> bool:
        """Tell whether no other code can reach the bytes: they may leave, and stay unchanged meanwhile (R1)."""
        return self.storage is not None and self.holders() == _ALONE

    def holders(self) -> tuple[int, int]:
        """Return how many hold the storage in C++ (tensors, and its Python object once) and in Python."""
        assert _use_count is not None, "no backend is made where it is missing"
        return _use_count(self.cdata), sys.getrefcount(self.storage)

    def may_be_written(self) -> bool:
        """Tell whether its bytes could be written now and given up then."""
        return self.state is Residence.RESIDENT and self.is_alone()

    def may_be_released(self) -> bool:
        """Tell whether a tier holds the same bytes and no other code can reach these."""
        return self.state is Residence.CLEAN and self.is_alone()

    def keep(self) -> bool:
        """Stay in fast memory, if it is leaving; return False if it has left already."""
        if self.state is Residence.LEAVING:
            self.wanted = True
        return self.state is not Residence.AWAY


# What `holders` says of a storage that only its record holds: measured, as nothing promises it.
_ALONE = SavedStorage(0, torch.empty(1, device="cpu").untyped_storage()).holders() if can_count_holders else None

R = TypeVar("R", bound=SavedStorage)


@dataclass(frozen=True, slots=True)
class Pack(Generic[R]):
    """A saved tensor. `probe` shares its version counter and nothing else: no bytes."""

    record: R
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    probe: torch.Tensor


def unreadable(nbytes: int, cause: OSError, *, tier: str, what: str = "saved for backward") -> SpillError:
    """Return the error for bytes that did not come back from a tier, or not as they left."""
    what = f"{format_bytes(nbytes)} {what}"
    if isinstance(cause, SpillCorrupted):
        return SpillCorrupted(errno.EBADMSG, f"{what} came back changed from tier '{tier}': its checksum differs")
    return SpillError(cause.errno or errno.EIO, f"{what} cannot be read back from tier '{tier}': {cause}")


def bring_back_each(records: Iterable[int], bring_back: Callable[[int], None]) -> None:
    """Bring back all that can be: what could not be read is raised at the end, and keeps none of the others away."""
    failure: SpillError | None = None
    for record in records:
        try:
            bring_back(record)
        except SpillError as error:
            failure = error
    if failure is not None:
        raise failure
