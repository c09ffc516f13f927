"""A link as its transfers found it: what was measured before a run, corrected by what the run saw."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.core.machine import Link

LEAST_BYTES = 8 << 20
"""Less than this says too little of a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Transfers of one kind. `busy_s` is the time in which there was one under way."""

    nbytes: float
    transfers: float
    busy_s: float

    def plus(self, other: Moved, *, times: int = 1) -> Moved:
        """Return both together; with `times=-1`, what came after `other`."""
        return Moved(
            nbytes=self.nbytes + times * other.nbytes,
            transfers=self.transfers + times * other.transfers,
            busy_s=self.busy_s + times * other.busy_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a link carried: beside a program that computed, and while it waited."""

    write: Moved
    read: Moved
    write_waited: Moved
    read_waited: Moved

    def plus(self, other: Traffic, *, times: int = 1) -> Traffic:
        """Return both together; with `times=-1`, what came after `other`."""
        return Traffic(
            write=self.write.plus(other.write, times=times),
            read=self.read.plus(other.read, times=times),
            write_waited=self.write_waited.plus(other.write_waited, times=times),
            read_waited=self.read_waited.plus(other.read_waited, times=times),
        )


def link_seen(link: Link, traffic: Traffic) -> Link:
    """Return `link` with the rates of `traffic`: its figures scaled so that they account for the time transfers took.

    A kind with too little traffic to tell keeps what `link` says. If the program waited for all there was, both
    directions are as much slower beside it than `link` says as they were then.
    """
    waited_bytes = traffic.write_waited.nbytes + traffic.read_waited.nbytes
    if waited_bytes >= LEAST_BYTES > max(traffic.write.nbytes, traffic.read.nbytes):
        expected_s = link.wait_s(_write_s(link, traffic.write_waited) + _read_s(link, traffic.read_waited))
        if not expected_s > 0:
            return link
        both = (traffic.write_waited.busy_s + traffic.read_waited.busy_s) / expected_s
        return _slower(link, write=both, read=both)
    write, read = (
        moved.busy_s / expected_s if moved.nbytes >= LEAST_BYTES and expected_s > 0 else 1.0
        for moved, expected_s in (
            (traffic.write, _write_s(link, traffic.write)),
            (traffic.read, _read_s(link, traffic.read)),
        )
    )
    seen = _slower(link, write=write, read=read)
    if waited_bytes < LEAST_BYTES:
        return seen
    beside_s = _write_s(seen, traffic.write_waited) + _read_s(seen, traffic.read_waited)
    if not beside_s > 0:
        return seen  # of a link without limits there is nothing to say
    return replace(seen, idle_speedup=beside_s / (traffic.write_waited.busy_s + traffic.read_waited.busy_s))


def _slower(link: Link, *, write: float, read: float) -> Link:
    return replace(
        link,
        write_bytes_per_s=link.write_bytes_per_s / write,
        write_latency_s=link.write_latency_s * write,
        read_bytes_per_s=link.read_bytes_per_s / read,
        read_latency_s=link.read_latency_s * read,
    )


def _write_s(link: Link, moved: Moved) -> float:
    return moved.transfers * link.write_latency_s + moved.nbytes / link.write_bytes_per_s


def _read_s(link: Link, moved: Moved) -> float:
    return moved.transfers * link.read_latency_s + moved.nbytes / link.read_bytes_per_s
