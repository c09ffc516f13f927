"""Reads and writes the logs of DTR's simulator: JSON lines, one instruction each.

DTR (Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021) logs what a training step does with tensors, and
its simulator replays that. Instructions, by their field INSTRUCTION:

    CONSTANT NAME, then MEMORY NAME MEMORY            a tensor that was there before
    CALL NAME ARGS RESULT TIME, then for each result  an operator
        MEMORY NAME MEMORY and ALIAS NAME ALIAS         its bytes, and which argument it is a view of (-1: none)
    MUTATE NAME ARGS MUTATE TIME                      an operator that changes the arguments at positions MUTATE
    COPY DST SRC, COPY_FROM DST SRC, RELEASE NAME     names come, move and go
    ANNOTATE ANNOTATION                               START: the log begins here; BACKWARD: the backward pass does

A log knows nothing of autograd's saves. On import, what the forward pass made and the backward pass reads counts as
saved, and as autograd's alone once the forward pass has read it for the last time. On export, memory beside storages
(scratch) and the difference between backward pass and update are lost. docs/formats.md has the details.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from lowtide.core.files import write_whole
from lowtide.core.trace import Kind, Op, Phase, Save, Storage, Trace
from lowtide.errors import TraceError

TIME_UNIT_S = 1e-9


def load_dtr(path: str | os.PathLike[str], *, model: str = "", unit_s: float = TIME_UNIT_S) -> Trace:
    """Return the trace of a log file; its times are in units of `unit_s`."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        return read_dtr(lines, model=model or Path(path).stem, unit_s=unit_s, source=str(path))


def read_dtr(lines: Iterable[str], *, model: str = "", unit_s: float = TIME_UNIT_S, source: str = "the log") -> Trace:
    """Return the trace of a log, line by line; `source` names it in errors."""
    reader = _Reader(source, unit_s)
    for number, line in enumerate(lines, start=1):
        reader.number = number
        if line.strip():
            reader.feed(_instruction(line, f"{source}, line {number}"))
    return reader.finish(model)


def dtr_lines(trace: Trace, *, unit_s: float = TIME_UNIT_S) -> Iterator[str]:
    """Yield the lines of the log that stands for a trace."""
    for instruction in _instructions(trace, unit_s):
        yield json.dumps(instruction, separators=(",", ":"))


def save_dtr(trace: Trace, path: str | os.PathLike[str], *, unit_s: float = TIME_UNIT_S) -> None:
    """Write the log that stands for a trace."""
    write_whole(path, "".join(f"{line}\n" for line in dtr_lines(trace, unit_s=unit_s)).encode())


# ---- reading ----


def _instruction(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is not JSON ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict) or not isinstance(found.get("INSTRUCTION"), str):
        raise TraceError(f"{where} is not an instruction: it has no field INSTRUCTION")
    return found


@dataclass(slots=True)
class _Tensor:
    """A storage of the log with the number of names it goes by."""

    nbytes: int
    first_op: int
    names: int = 1
    last_op: int | None = None
    versions: int = 0


@dataclass(slots=True)
class _Call:
    name: str
    phase: Phase
    duration_s: float
    reads: tuple[int, ...]
    writes: list[int]
    results: list[str] = field(default_factory=list)
    args: tuple[int, ...] = ()


class _Reader:
    def __init__(self, source: str, unit_s: float) -> None:
        self.source = source
        self.number = 0
        self._unit_s = unit_s
        self._restart()

    def _restart(self) -> None:
        self._tensors: list[_Tensor] = []
        self._named: dict[str, int] = {}
        self._calls: list[_Call] = []
        self._bytes: dict[str, int] = {}
        self._backward = False
        self._constant: str | None = None

    def feed(self, found: dict[str, Any]) -> None:
        """Take in one instruction."""
        match found["INSTRUCTION"]:
            case "CONSTANT":
                self._constant = self._text(found, "NAME")
            case "MEMORY":
                self._memory(self._text(found, "NAME"), self._number(found, "MEMORY"))
            case "ALIAS":
                self._result(self._text(found, "NAME"), self._number(found, "ALIAS"))
            case "CALL" | "MUTATE":
                self._call(found)
            case "COPY":
                self._bind(self._text(found, "DST"), self._known(self._text(found, "SRC")))
            case "COPY_FROM":
                target = self._known(self._text(found, "SRC"))
                self._release(self._text(found, "DST"))
                self._bind(self._text(found, "DST"), target)
            case "RELEASE":
                self._release(self._text(found, "NAME"))
            case "ANNOTATE":
                self._annotate(self._text(found, "ANNOTATION"))
            case other:
                raise self._error(f"{other!r:.40} is not an instruction of a DTR log")

    def _annotate(self, annotation: str) -> None:
        if annotation == "START":
            self._restart()  # earlier operators are not part of the step
        elif annotation == "BACKWARD":
            self._backward = True

    def _memory(self, name: str, nbytes: int) -> None:
        if nbytes < 0:
            raise self._error(f"{name!r:.40} has {nbytes} bytes")
        if self._constant is not None:
            if name != self._constant:
                raise self._error(f"the bytes of {self._constant!r:.40} are missing")
            self._constant = None
            self._bind(name, self._new(nbytes, first_op=-1))
        else:
            self._bytes[name] = nbytes

    def _call(self, found: dict[str, Any]) -> None:
        name = self._text(found, "NAME")
        # Names of operators of the backward pass say so even where the log is not annotated.
        self._backward = self._backward or "backward" in name.lower()
        args = tuple(self._known(arg) for arg in self._texts(found, "ARGS"))
        time = self._number(found, "TIME")
        if time < 0:
            raise self._error(f"operator {name!r:.40} took {time} units of time")
        call = _Call(
            name=name,
            phase=Phase.BACKWARD if self._backward else Phase.FORWARD,
            duration_s=time * self._unit_s,
            reads=tuple(dict.fromkeys(args)),
            writes=[],
            args=args,
        )
        self._calls.append(call)
        if found["INSTRUCTION"] == "CALL":
            call.results = self._texts(found, "RESULT")
            return
        positions = found.get("MUTATE")
        if not isinstance(positions, list):
            raise self._error("MUTATE is not a list of positions")
        for position in positions:
            if type(position) is not int or not 0 <= position < len(args):
                raise self._error(f"argument {position!r:.40} is mutated and there are {len(args)}")
            if args[position] not in call.writes:
                call.writes.append(args[position])
                self._tensors[args[position]].versions += 1

    def _result(self, name: str, alias: int) -> None:
        if not self._calls or name not in self._calls[-1].results or name not in self._bytes:
            raise self._error(f"{name!r:.40} is not a result of the last operator whose bytes are known")
        call = self._calls[-1]
        if alias >= len(call.args):
            raise self._error(f"{name!r:.40} is a view of argument {alias} and there are {len(call.args)}")
        nbytes = self._bytes.pop(name)
        if alias >= 0:
            self._bind(name, call.args[alias])
            return
        made = self._new(nbytes, first_op=len(self._calls) - 1)
        call.writes.append(made)
        self._bind(name, made)

    def _new(self, nbytes: int, *, first_op: int) -> int:
        self._tensors.append(_Tensor(nbytes=nbytes, first_op=first_op, names=0))
        return len(self._tensors) - 1

    def _bind(self, name: str, tensor: int) -> None:
        self._named[name] = tensor
        self._tensors[tensor].names += 1

    def _release(self, name: str) -> None:
        tensor = self._named.pop(name, None)
        if tensor is None:
            return  # logs release names that they never introduced
        self._tensors[tensor].names -= 1
        if not self._tensors[tensor].names:
            self._tensors[tensor].last_op = len(self._calls) - 1

    def _known(self, name: str) -> int:
        if name not in self._named:
            raise self._error(f"{name!r:.40} is used and was never made")
        return self._named[name]

    def _text(self, found: dict[str, Any], key: str) -> str:
        if not isinstance(found.get(key), str):
            raise self._error(f"{key} is missing or no text")
        return str(found[key])

    def _texts(self, found: dict[str, Any], key: str) -> list[str]:
        value = found.get(key)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._error(f"{key} is missing or no list of texts")
        return value

    def _number(self, found: dict[str, Any], key: str) -> int:
        try:
            return int(found[key])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise self._error(f"{key} is missing or not a number") from None

    def _error(self, what: str) -> TraceError:
        return TraceError(f"{self.source}, line {self.number}: {what}")

    def finish(self, model: str) -> Trace:
        """Return the trace of all instructions."""
        end = len(self._calls)
        storages = tuple(self._storage(tensor, end) for tensor in self._tensors)
        static_bytes = sum(block.nbytes for block in storages if block.first_op < 0 and block.last_op >= end)
        ops = _timed(self._calls, _alive(storages, end))
        return Trace(ops=ops, storages=storages, saves=_saves(ops, storages), static_bytes=static_bytes, model=model)

    def _storage(self, tensor: _Tensor, end: int) -> Storage:
        made = tensor.first_op >= 0
        return Storage(
            nbytes=tensor.nbytes,
            kind=Kind.ACTIVATION if made else Kind.INPUT,
            first_op=tensor.first_op,
            last_op=end if tensor.last_op is None else max(tensor.last_op, tensor.first_op),
            producer=tensor.first_op if made else None,
            versions=tensor.versions,
        )


def _alive(storages: Sequence[Storage], end: int) -> list[int]:
    change = [0] * (end + 2)
    for block in storages:
        change[max(block.first_op, 0)] += block.nbytes
        change[min(block.last_op, end) + 1] -= block.nbytes
    return list(accumulate(change))[:end]


def _timed(calls: Sequence[_Call], alive_bytes: Sequence[int]) -> tuple[Op, ...]:
    starts = accumulate((call.duration_s for call in calls), initial=0.0)
    return tuple(
        Op(
            name=call.name,
            phase=call.phase,
            start_s=start_s,
            duration_s=call.duration_s,
            peak_bytes=nbytes,
            reads=call.reads,
            writes=tuple(call.writes),
        )
        for call, start_s, nbytes in zip(calls, starts, alive_bytes, strict=False)
    )


def _saves(ops: Sequence[Op], storages: Sequence[Storage]) -> tuple[Save, ...]:
    """Return what the forward pass made and the backward pass reads, in the order of making."""
    last_touch: dict[int, int] = {}
    uses: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for storage in {*op.reads, *op.writes}:
            if op.phase is Phase.FORWARD:
                last_touch[storage] = index
            elif storage in op.reads:
                uses.setdefault(storage, []).append(index)
    return tuple(
        Save(
            storage=storage,
            packed_op=block.first_op,
            free_op=last_touch[storage] + 1,
            uses=tuple(uses[storage]),
            released_op=max(block.last_op, uses[storage][-1]),
        )
        for storage, block in enumerate(storages)
        if block.first_op >= 0 and storage in uses and ops[block.first_op].phase is Phase.FORWARD
    )


# ---- writing ----


def _instructions(trace: Trace, unit_s: float) -> Iterator[dict[str, Any]]:
    yield {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}
    before = [storage for storage, block in enumerate(trace.storages) if block.first_op < 0]
    rest_bytes = trace.static_bytes - sum(trace.storages[storage].nbytes for storage in before)
    for name, nbytes in (
        *((f"t{storage}", trace.storages[storage].nbytes) for storage in before),
        *((("static", rest_bytes),) if rest_bytes > 0 else ()),
    ):
        yield {"INSTRUCTION": "CONSTANT", "NAME": name}
        yield {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(nbytes)}
    made: dict[int, list[int]] = {}
    freed: dict[int, list[int]] = {}
    for storage, block in enumerate(trace.storages):
        if block.first_op >= 0:
            made.setdefault(block.first_op, []).append(storage)
        freed.setdefault(block.last_op, []).append(storage)
    backward = False
    for index, op in enumerate(trace.ops):
        if op.phase is not Phase.FORWARD and not backward:
            backward = True
            yield {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"}
        yield from _operator(trace, op, made.get(index, []), unit_s)
        for storage in freed.get(index, ()):
            yield {"INSTRUCTION": "RELEASE", "NAME": f"t{storage}"}


def _operator(trace: Trace, op: Op, made: Sequence[int], unit_s: float) -> Iterator[dict[str, Any]]:
    """Yield an operator: a CALL for what it makes, a MUTATE for what it changes, which takes no time if it is both."""
    changed = [storage for storage in op.writes if storage not in made]
    time = str(round(op.duration_s / unit_s))
    if made or not changed:
        args = [f"t{storage}" for storage in op.reads if storage not in made]
        results = [f"t{storage}" for storage in made]
        yield {"INSTRUCTION": "CALL", "NAME": op.name, "ARGS": args, "RESULT": results, "TIME": time}
        for storage in made:
            nbytes = str(trace.storages[storage].nbytes)
            yield {"INSTRUCTION": "MEMORY", "NAME": f"t{storage}", "MEMORY": nbytes}
            yield {"INSTRUCTION": "ALIAS", "NAME": f"t{storage}", "ALIAS": "-1"}
        time = "0"
    if changed:
        operands = list(dict.fromkeys((*(storage for storage in op.reads if storage not in made), *changed)))
        yield {
            "INSTRUCTION": "MUTATE",
            "NAME": op.name,
            "ARGS": [f"t{storage}" for storage in operands],
            "MUTATE": [operands.index(storage) for storage in changed],
            "TIME": time,
        }
