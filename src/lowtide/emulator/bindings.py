"""The native emulator as a typed Python object: what `native/knobs.cpp` exports."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from lowtide.compiled import Library, Torch, build
from lowtide.emulator.records import EngineStats, Stats, TraceRecord
from lowtide.errors import NativeUnavailable

PressureCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64)

_NATIVE = Path(__file__).parent / "native"
# emulator.cpp includes the others; all of them decide what the library is.
LIBRARY = Library(
    name="liblowtide_sim.so",
    title="the emulator",
    build_s=30,
    directory=_NATIVE,
    sources=("emulator.cpp",),
    headers=tuple(
        sorted(path.name for path in _NATIVE.iterdir() if path.suffix in (".cpp", ".h") and path.name != "emulator.cpp")
    ),
)

_ENGINES = ("compute", "h2d", "d2h")
_STATS = 16
_RECORD = 7


class Native:
    """The loaded emulator. Loading registers the device's operators with PyTorch and cannot be undone."""

    def __init__(self, path: Path) -> None:
        import torch

        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]  # torch does not type it
        self._library = ctypes.CDLL(str(path))
        integer, i64, u64, real = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double
        pointer, text = ctypes.c_void_p, ctypes.c_char_p

        def call(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
            return function  # type: ignore[no-any-return]  # ctypes is untyped

        self.set_devices = call("sim_set_devices", None, integer, u64)
        self.device_count = call("sim_device_count", integer)
        self.forked = call("sim_forked", integer)
        self.set_capacity = call("sim_set_capacity", None, u64)
        self.set_allowed = call("sim_set_allowed", None, integer, u64)
        self.set_bandwidth = call("sim_set_bandwidth", integer, real, real)
        self.set_latency = call("sim_set_latency", None, real)
        self.set_slowdown = call("sim_set_slowdown", None, real)
        self.set_jitter = call("sim_set_jitter", None, real, u64)
        self.set_poison = call("sim_set_poison", None, integer)
        self.set_strict = call("sim_set_strict", None, integer)
        self.set_fragmentation = call("sim_set_fragmentation", None, integer)
        self.set_queue_depth = call("sim_set_queue_depth", None, i64)
        self._set_pressure = call("sim_set_pressure", None, PressureCallback)
        self._stats = call("sim_stats", integer, integer, pointer)
        self.reset_stats = call("sim_reset_stats", integer, integer)
        self.trace_enable = call("sim_trace_enable", None, integer)
        self.trace_clear = call("sim_trace_clear", None)
        self._trace_read = call("sim_trace_read", i64, pointer, i64)
        self._trace_name = call("sim_trace_name", i64, i64, text, i64)
        self.watch_races = call("sim_watch_races", None, integer)
        self._host_access = call("sim_host_access", None, pointer, i64, integer, text)
        self._races_take = call("sim_races_take_report", u64, text, u64)
        self._callbacks: list[Callable[[int, int], bool]] = []
        self._wrapped: object = None

    def ask_for_room(self, callback: Callable[[int, int], bool], *, asked: bool = True) -> None:
        """Ask `callback(device, need_bytes)` before memory runs out, or no more; the one that was given last first."""
        callbacks = [each for each in self._callbacks if each != callback]
        self._callbacks = [callback, *callbacks] if asked else callbacks
        if self._wrapped is None:  # once: a thread may be inside it at any time
            self._wrapped = PressureCallback(self._ask)
            self._set_pressure(self._wrapped)

    def _ask(self, device: int, need_bytes: int) -> int:
        return int(any(callback(device, need_bytes) for callback in self._callbacks))

    def stats(self, device: int) -> Stats:
        """Return the device's totals."""
        out = (ctypes.c_int64 * _STATS)()
        if self._stats(device, out) != 0:
            raise IndexError(device)
        return Stats(
            live_bytes=out[0],
            peak_bytes=out[1],
            active_bytes=out[2],
            peak_active_bytes=out[3],
            allocations=out[4],
            out_of_memory=out[5],
            compute_s=out[6] / 1e9,
            kernels=out[7],
            h2d=EngineStats(copies=out[8], nbytes=out[9], busy_s=out[10] / 1e9, hidden_s=out[11] / 1e9),
            d2h=EngineStats(copies=out[12], nbytes=out[13], busy_s=out[14] / 1e9, hidden_s=out[15] / 1e9),
        )

    def trace(self) -> list[TraceRecord]:
        """Return everything that was traced and is not cleared, in the order of its end."""
        count = self._trace_read(None, 0)
        out = (ctypes.c_int64 * (_RECORD * count))()
        count = min(count, self._trace_read(out, count))
        rows = [out[_RECORD * i : _RECORD * (i + 1)] for i in range(count)]
        names = {row[6]: self._name(row[6]) for row in rows}
        return [
            TraceRecord(
                engine=_ENGINES[kind],
                device=device,
                stream=stream,
                name=names[name],
                start_s=start_ns / 1e9,
                end_s=end_ns / 1e9,
                nbytes=nbytes,
            )
            for kind, device, stream, start_ns, end_ns, nbytes, name in rows
        ]

    def host_access(self, address: int, nbytes: int, *, write: bool, name: str) -> None:
        """Tell the race detector that the calling thread touches memory by other means than an operator."""
        self._host_access(address, nbytes, int(write), name.encode())

    def take_races(self) -> tuple[str, ...]:
        """Return the race detector's findings and forget them."""
        text = ctypes.create_string_buffer(1 << 16)
        while (length := self._races_take(text, len(text))) > len(text):
            text = ctypes.create_string_buffer(length)
        return tuple(text.raw[:length].decode().splitlines())

    def _name(self, index: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._trace_name(index, text, len(text))
        return text.value.decode()


@cache
def load() -> Native:
    """Return the native emulator, building it first if need be. Raises NativeUnavailable with the reason."""
    path = build(LIBRARY, Torch.here())
    try:
        return Native(path)
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"cannot load {path.name}: {error}") from error
