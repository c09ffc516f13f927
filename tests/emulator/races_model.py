"""The race detector through its C interface, and a brute-force account of what it must find."""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "src" / "lowtide" / "emulator" / "native"
BASE = 0x10000
HOST = 0  # the agent of all host threads that have none of their own

# (address, nbytes, writes) of a job
Access = tuple[int, int, bool]
# (kind, first side, second side): see parse()
Pair = tuple[str, str, str]


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


@cache
def compile_detector() -> Path:
    """Compile the detector alone, and the bench, without torch; once for a test session."""
    cxx = compiler()
    assert cxx is not None
    directory = Path(tempfile.mkdtemp(prefix="races-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    sources = [NATIVE / "races.cpp", Path(__file__).with_name("races_bench.cpp")]
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread", f"-I{NATIVE}"]
    command = [cxx, *flags, *map(str, sources), "-o", str(directory / "libraces.so")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return directory / "libraces.so"


class Detector:
    """The C interface under Python's names; `host=` says which host thread acts."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library))
        u64, i64, i32, pointer, text = (
            ctypes.c_uint64,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_char_p,
        )
        signatures = {
            "enable": ([ctypes.c_int], None),
            "enabled": ([], ctypes.c_int),
            "reset": ([], None),
            "stream": ([ctypes.c_int, i64], i32),
            "new_host": ([text], i32),
            "act_as": ([i32], None),
            "send": ([u64], None),
            "receive": ([u64], None),
            "submit": ([i32, text, u64, pointer, pointer, pointer], None),
            "host_access": ([pointer, u64, ctypes.c_int, text], None),
            "record": ([i64, i32], None),
            "wait": ([i64, i32], None),
            "sync": ([i64], None),
            "sync_stream": ([i32], None),
            "sync_device": ([ctypes.c_int], None),
            "free": ([pointer, u64, i32, pointer, u64], None),
            "reached": ([pointer, i32], None),
            "alloc": ([pointer, u64, i32, ctypes.c_int], None),
            "count": ([], u64),
            "tracked_ranges": ([], u64),
            "take_report": ([pointer, u64], u64),
        }
        for name, (arguments, result) in signatures.items():
            function = getattr(self.lib, f"sim_races_{name}")
            function.argtypes, function.restype = arguments, result
            setattr(self, f"_{name}", function)
        self.enable(True)

    def afresh(self) -> Detector:
        """Forget everything: for the next test."""
        self.enable(True)
        self.reset()
        self.act_as(HOST)
        return self

    def enable(self, on: bool) -> None:
        self._enable(on)

    def reset(self) -> None:
        self._reset()

    def stream(self, index: int, device: int = 0) -> int:
        return self._stream(device, index)

    def new_host(self, name: str) -> int:
        return self._new_host(name.encode())

    def act_as(self, host: int) -> None:
        self._act_as(host)

    def send(self, token: int, *, host: int = HOST) -> None:
        self._act_as(host)
        self._send(token)

    def receive(self, token: int, *, host: int = HOST) -> None:
        self._act_as(host)
        self._receive(token)

    def submit(self, stream: int, name: str, *accesses: Access, host: int = HOST) -> None:
        n = len(accesses)
        ptrs = (ctypes.c_uint64 * n)(*(BASE + a[0] for a in accesses))
        sizes = (ctypes.c_uint64 * n)(*(a[1] for a in accesses))
        writes = (ctypes.c_uint8 * n)(*(a[2] for a in accesses))
        self._act_as(host)
        self._submit(stream, name.encode(), n, ptrs, sizes, writes)

    def host_access(self, name: str, access: Access, *, host: int = HOST) -> None:
        self._act_as(host)
        self._host_access(BASE + access[0], access[1], access[2], name.encode())

    def record(self, event: int, stream: int, *, host: int = HOST) -> None:
        self._act_as(host)
        self._record(event, stream)

    def wait(self, event: int, stream: int, *, host: int = HOST) -> None:
        self._act_as(host)
        self._wait(event, stream)

    def sync(self, event: int, *, host: int = HOST) -> None:
        self._act_as(host)
        self._sync(event)

    def sync_stream(self, stream: int, *, host: int = HOST) -> None:
        self._act_as(host)
        self._sync_stream(stream)

    def sync_device(self, device: int = 0, *, host: int = HOST) -> None:
        self._act_as(host)
        self._sync_device(device)

    def alloc(self, at: int, nbytes: int, home: int, *, stream_ordered: bool = False, host: int = HOST) -> None:
        self._act_as(host)
        self._alloc(BASE + at, nbytes, home, stream_ordered)

    def free(self, at: int, nbytes: int, home: int, *recorded: int, host: int = HOST) -> None:
        self._act_as(host)
        self._free(BASE + at, nbytes, home, (ctypes.c_int32 * len(recorded))(*recorded), len(recorded))

    def reached(self, at: int, agent: int) -> None:
        self._reached(BASE + at, agent)

    def count(self) -> int:
        return self._count()

    def tracked_ranges(self) -> int:
        return self._tracked_ranges()

    def take_report(self) -> list[str]:
        buffer = ctypes.create_string_buffer(self._take_report(None, 0) or 1)
        nbytes = self._take_report(buffer, len(buffer))
        return buffer.raw[:nbytes].decode().splitlines()

    def pairs(self) -> set[Pair]:
        return {parse(line) for line in self.take_report()}


_LINES = {
    "first use": r"race: '(?P<second>[^']*)' on .* while it is allocated on (?P<first>.*), whose earlier",
    "race": r"race: '(?P<first>[^']*)' on .* while '(?P<second>[^']*)' on ",
    "reused": r"use after free: '(?P<first>[^']*)' on .* given out again on (?P<second>.*): n",
    "freed in use": r"use after free: '(?P<first>[^']*)' on .* while it is freed on (?P<second>.*): n",
    "freed twice": r"use after free: a second free on (?P<second>.*) of .*, which was freed on (?P<first>.*) before \(",
    "used when free": r"use after free: '(?P<second>[^']*)' on .*, which was freed on (?P<first>.*) before \(",
}


def parse(line: str) -> Pair:
    """Return the kind and the two sides: a job's name, or the agent that allocated or freed."""
    for kind, pattern in _LINES.items():
        if found := re.match(pattern, line):
            return kind, found["first"], found["second"]
    raise AssertionError(f"not a finding: {line}")


@dataclass(frozen=True)
class Seen:
    """An access to a byte, as the brute force remembers it."""

    node: int
    agent: int
    name: str
    write: bool
    is_alloc: bool = False


@dataclass(frozen=True)
class FreePoint:
    home: int
    tails: dict[int, int | None]
    reached: set[int] = field(default_factory=set)


class BruteForce:
    """Happens-before as reachability in the graph of all operations, and every byte with the list of all its accesses.

    It has the methods of `Detector` and no clocks: a node for each operation of each agent, an edge for each thing that
    orders two of them, and the set of all ancestors of each node.
    """

    def __init__(self, labels: dict[int, str]) -> None:
        self.labels = labels
        self.ancestors: list[int] = []  # bit i of the n-th: node i is n, or happens before it
        self.tail: dict[int, int | None] = dict.fromkeys(labels)
        self.events: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.bytes: dict[int, list[Seen]] = {}
        self.freed: dict[int, FreePoint] = {}
        self.found: set[Pair] = set()
        self.racing: set[str] = (
            set()
        )  # accesses that conflict with any earlier one, not only with the last of each agent
        self.unordered: set[tuple[str, str]] = set()

    def node(self, agent: int, *after: int | None) -> int:
        new = len(self.ancestors)
        reach = 1 << new
        for before in (self.tail[agent], *after):
            if before is not None:
                reach |= self.ancestors[before]
        self.ancestors.append(reach)
        self.tail[agent] = new
        return new

    def before(self, first: int, second: int | None) -> bool:
        return second is not None and bool(self.ancestors[second] >> first & 1)

    def frontier(self, history: Sequence[Seen]) -> list[Seen]:
        """Leave out what a later access stands for: a write that comes after it, or the same agent's next read."""
        return [
            e
            for i, e in enumerate(history)
            if not any(
                self.before(e.node, w.node) and (w.write or (w.agent == e.agent and not e.write))
                for w in history[i + 1 :]
            )
        ]

    def touch(self, agent: int, node: int, name: str, accesses: Iterable[Access]) -> None:
        for at, nbytes, write in accesses:
            for byte in range(at, at + nbytes):
                if byte in self.freed:
                    self.found.add(("used when free", self.labels[self.freed[byte].home], name))
                    continue
                history = self.bytes.setdefault(byte, [])
                for e in history:
                    if (e.write or write) and not self.before(e.node, node):
                        self.racing.add(name)
                        self.unordered.add((e.name, name))
                for e in self.frontier(history):
                    if (e.write or write) and not self.before(e.node, node):
                        self.found.add(
                            ("first use", self.labels[e.agent], name) if e.is_alloc else ("race", e.name, name)
                        )
                history.append(Seen(node, agent, name, write))

    def submit(self, stream: int, name: str, *accesses: Access, host: int = HOST) -> None:
        self.touch(stream, self.node(stream, self.node(host)), name, accesses)

    def host_access(self, name: str, access: Access, *, host: int = HOST) -> None:
        self.touch(host, self.node(host), name, [access])

    def record(self, event: int, stream: int, *, host: int = HOST) -> None:
        self.events[event] = self.node(stream, self.node(host))

    def wait(self, event: int, stream: int, *, host: int = HOST) -> None:
        if event in self.events:
            self.node(stream, self.node(host), self.events[event])

    def sync(self, event: int, *, host: int = HOST) -> None:
        self.node(host, self.events.get(event))

    def sync_stream(self, stream: int, *, host: int = HOST) -> None:
        self.node(host, self.tail[stream])

    def sync_device(self, device: int = 0, *, host: int = HOST) -> None:
        suffix = f" of device {device}" if device else ""
        streams = [a for a, label in self.labels.items() if re.fullmatch(rf"stream \d+{suffix}", label)]
        self.node(host, *(self.tail[a] for a in streams))

    def send(self, token: int, *, host: int = HOST) -> None:
        self.tokens.setdefault(token, []).append(self.node(host))

    def receive(self, token: int, *, host: int = HOST) -> None:
        self.node(host, *self.tokens.pop(token, []))

    def free(self, at: int, nbytes: int, home: int, *recorded: int, host: int = HOST) -> None:
        point = FreePoint(home, {agent: self.tail[agent] for agent in (home, *recorded)})
        for byte in range(at, at + nbytes):
            if byte in self.freed:
                self.found.add(("freed twice", self.labels[self.freed[byte].home], self.labels[home]))
                continue
            waited_for = []
            for e in self.frontier(self.bytes.get(byte, [])):
                if self.before(e.node, self.tail[host]):
                    continue
                if any(self.before(e.node, tail) for tail in point.tails.values()):
                    waited_for.append(e)
                else:
                    self.found.add(("freed in use", e.name, self.labels[home]))
            self.bytes[byte] = waited_for
            self.freed[byte] = point

    def reached(self, at: int, agent: int) -> None:
        if at in self.freed:
            self.freed[at].reached.add(agent)

    def alloc(self, at: int, nbytes: int, home: int, *, stream_ordered: bool = False, host: int = HOST) -> None:
        known = (self.tail[home], self.tail[host])
        for byte in range(at, at + nbytes):
            point = self.freed.pop(byte, None)
            for e in self.bytes.get(byte, []) if point and stream_ordered else []:
                passed = any(self.before(e.node, tail) for a, tail in point.tails.items() if a in point.reached)
                if not passed and not any(self.before(e.node, tail) for tail in known):
                    self.found.add(("reused", e.name, self.labels[home]))
        node = self.node(home)
        for byte in range(at, at + nbytes):
            self.bytes[byte] = [Seen(node, home, "allocation", write=True, is_alloc=True)]
