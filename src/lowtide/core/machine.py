"""What a machine can do: its links, measured or stated."""

from __future__ import annotations

from dataclasses import dataclass

MACHINE_VERSION = 4
# The source of a machine's figures: Lowtide's own measurements of the host that it runs on, or of its transfers.
MEASURED = "measured"
SEEN = "seen"
_HOST_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How operators reach slow memory in place, without a copy of it in fast memory.

    The rates are those of an operator on all cores. `mixed_share` is left of both where one operator reads and writes
    the tier at once. `latency_s` is paid once for each operand. `own_channel`: its traffic passes beside that of fast
    memory (CXL); otherwise the two take turns on the same channels (Optane).
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_share: float = 1.0
    latency_s: float = 0.0
    own_channel: bool = False

    def access_s(self, *, read_bytes: float, written_bytes: float, operands: int) -> float:
        """Return how long one operator is busy with what it reads and writes here."""
        if not operands:
            return 0.0
        share = self.mixed_share if read_bytes and written_bytes else 1.0
        moving_s = read_bytes / self.read_bytes_per_s + written_bytes / self.write_bytes_per_s
        return operands * self.latency_s + moving_s / share


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The path between fast memory and a tier, and the tier. A transfer of n bytes takes `latency_s + n / bandwidth`.

    The figures are those of transfers beside a program that computes. `idle_speedup` is how many times as fast they
    are while it waits: where transfers need the cores that compute, waiting lets them go faster. A migration
    that the plan has the program wait for from its start (`waited_...`, None: as beside) may use all of its cores.

    `capacity_bytes` is what the tier holds (None: no limit is known). `access` says how fast operators read and write
    it in place (None: they cannot, it is not `addressable`); what is placed there is in pages of `page_bytes`.
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    write_latency_s: float = 0.0
    read_latency_s: float = 0.0
    duplex: bool = False
    idle_speedup: float = 1.0
    waited_write_bytes_per_s: float | None = None
    waited_read_bytes_per_s: float | None = None
    capacity_bytes: int | None = None
    page_bytes: int = 4096
    access: Access | None = None

    @property
    def addressable(self) -> bool:
        """Whether operators can read and write the tier in place."""
        return self.access is not None

    def write_s(self, nbytes: int, *, waited: bool = False) -> float:
        """Return how long it takes to move `nbytes` out of fast memory."""
        rate = self.waited_write_bytes_per_s if waited else None
        return self.write_latency_s + nbytes / (rate or self.write_bytes_per_s)

    def read_s(self, nbytes: int, *, waited: bool = False) -> float:
        """Return how long it takes to bring `nbytes` back."""
        rate = self.waited_read_bytes_per_s if waited else None
        return self.read_latency_s + nbytes / (rate or self.read_bytes_per_s)

    def work_s(self, *, step_s: float, stall_s: float) -> float:
        """Return the most that the link can have done in a step that waited `stall_s`, by its time beside operators."""
        return step_s + stall_s * (self.idle_speedup - 1)

    def wait_s(self, beside_s: float) -> float:
        """Return how long a program waits for what would take `beside_s` beside its operators."""
        return beside_s / self.idle_speedup


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine as the planner sees it: one fast memory and the links below it, by tier name.

    `flops_per_s` and `memory_bytes_per_s` are what its compute reaches at best (None: not known), `capacity_bytes` its
    fast memory, `page_bytes` and `page_fault_s` what a reactive pager moves at once and pays for each fault.
    """

    name: str
    links: dict[str, Link]
    copy_bytes_per_s: float = 5e9
    source: str = "assumed"
    flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    capacity_bytes: int | None = None
    page_bytes: int = 2 << 20
    page_fault_s: float = 0.0

    @property
    def moves_pages(self) -> bool:
        """Whether every tensor of a training can leave, page by page: on a host; on an accelerator what autograd saved.

        Hosts have the kernel's own pages, or were measured.
        """
        return self.page_bytes <= _HOST_PAGE_BYTES or self.source in (MEASURED, SEEN)

    @property
    def addressable(self) -> tuple[str, ...]:
        """The tiers that operators can read and write in place."""
        return tuple(tier for tier, link in self.links.items() if link.addressable)
