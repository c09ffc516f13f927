"""Machines as JSON documents."""

from __future__ import annotations

from math import inf
from typing import Any

from lowtide.core.columns import plain
from lowtide.core.fields import Damaged, Fields, integer, optional_integer, optional_real, real, text, truth
from lowtide.core.machine import Access, Link, Machine

_LINK_REALS = ("write_bytes_per_s", "read_bytes_per_s", "write_latency_s", "read_latency_s", "idle_speedup")
_LINK_LATER = ("waited_write_bytes_per_s", "waited_read_bytes_per_s", "capacity_bytes", "page_bytes")
_ACCESS_REALS = ("read_bytes_per_s", "write_bytes_per_s", "mixed_share", "latency_s")
_PLAIN = (
    "name",
    "source",
    "copy_bytes_per_s",
    "flops_per_s",
    "memory_bytes_per_s",
    "capacity_bytes",
    "page_bytes",
    "page_fault_s",
)


def encode_machine(machine: Machine) -> dict[str, Any]:
    """Return the document of a machine."""
    return {
        **{name: plain(getattr(machine, name)) for name in _PLAIN},
        "links": {tier: _encode_link(link) for tier, link in machine.links.items()},
    }


def _encode_link(link: Link) -> dict[str, Any]:
    access = link.access
    return {
        **{name: plain(getattr(link, name)) for name in (*_LINK_REALS, *_LINK_LATER)},
        "duplex": link.duplex,
        "access": None
        if access is None
        else {
            **{name: plain(getattr(access, name)) for name in _ACCESS_REALS},
            "own_channel": access.own_channel,
        },
    }


def decode_machine(fields: Fields, version: int) -> Machine:
    """Return the machine that a document of this version holds."""
    links = fields.object("links")
    later: dict[str, Any] = {}
    if version >= 2:
        later = {
            "flops_per_s": fields.get("flops_per_s", optional_real),
            "memory_bytes_per_s": fields.get("memory_bytes_per_s", optional_real),
            "capacity_bytes": fields.get("capacity_bytes", optional_integer),
            "page_bytes": fields.get("page_bytes", integer),
            "page_fault_s": fields.get("page_fault_s", real),
        }
    machine = Machine(
        name=fields.get("name", text),
        copy_bytes_per_s=fields.get("copy_bytes_per_s", real),
        source=fields.get("source", text),
        links={tier: _decode_link(links.object(tier), version) for tier in links.names()},
        **later,
    )
    check_machine(machine)
    return machine


def check_machine(machine: Machine) -> None:
    """Refuse figures that no machine has."""
    rates = {
        "copy_bytes_per_s": machine.copy_bytes_per_s,
        "flops_per_s": machine.flops_per_s,
        "memory_bytes_per_s": machine.memory_bytes_per_s,
        "page_bytes": machine.page_bytes,
        "capacity_bytes": machine.capacity_bytes,
    }
    times = {"page_fault_s": machine.page_fault_s}
    for tier, link in machine.links.items():
        for name in ("write_bytes_per_s", "read_bytes_per_s", "idle_speedup"):
            rates[f"{name} of {tier!r}"] = getattr(link, name)
        for name in _LINK_LATER:
            rates[f"{name} of {tier!r}"] = getattr(link, name)
        for name in ("write_latency_s", "read_latency_s"):
            times[f"{name} of {tier!r}"] = getattr(link, name)
        if link.access is not None:
            for name in ("read_bytes_per_s", "write_bytes_per_s", "mixed_share"):
                rates[f"{name} in place of {tier!r}"] = getattr(link.access, name)
            times[f"latency_s in place of {tier!r}"] = link.access.latency_s
    for name, rate in rates.items():
        if rate is not None and not rate > 0:
            raise Damaged(f"{name} is {rate}, which is not above 0")
    for name, seconds in times.items():
        if not 0 <= seconds < inf:
            raise Damaged(f"{name} is {seconds}, which is not a duration")


def _decode_link(fields: Fields, version: int) -> Link:
    names = _LINK_REALS if version >= 3 else _LINK_REALS[:-1]
    values: dict[str, Any] = {name: fields.get(name, real) for name in names}
    values["duplex"] = fields.get("duplex", truth)
    if version >= 4:
        values |= {
            "waited_write_bytes_per_s": fields.get("waited_write_bytes_per_s", optional_real),
            "waited_read_bytes_per_s": fields.get("waited_read_bytes_per_s", optional_real),
            "capacity_bytes": fields.get("capacity_bytes", optional_integer),
            "page_bytes": fields.get("page_bytes", integer),
            "access": fields.get("access", lambda value: None if value is None else _decode_access(value)),
        }
    return Link(**values)


def _decode_access(value: object) -> Access:
    fields = Fields(value, "access")
    return Access(
        **{name: fields.get(name, real) for name in _ACCESS_REALS}, own_channel=fields.get("own_channel", truth)
    )
