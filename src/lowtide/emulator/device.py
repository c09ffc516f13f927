"""The emulator's switch and its knobs."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from lowtide.core.units import format_bytes, parse_bytes
from lowtide.emulator.presets import preset as find_preset
from lowtide.emulator.records import Stats, TraceRecord
from lowtide.errors import BadArgument
from lowtide.memory.budget import memory_limits

if TYPE_CHECKING:
    import torch

    from lowtide.emulator.bindings import Native

NAME = "sim"
MAX_DEVICES = 8
# Addresses, not memory: a block must always find a hole, however the others lie.
_RESERVE_PER_MEMORY = 4
_RESERVE_MIN_BYTES = 16 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The knobs. Rates are bytes per second, 0 for as fast as memory; times are seconds.

    `slowdown` makes kernels take that many times as long; `jitter_s` delays every job of a stream by up to that long,
    by a sequence that `seed` decides; `poison` fills new blocks with NaN; `strict` refuses operands of two devices;
    `races` checks the order of everything; `trace` keeps a record of everything; `fragmentation` demands that a block
    lies below the capacity; `queue_depth` is how many launches the host may be ahead of a stream.
    """

    capacity_bytes: int
    d2h_bytes_per_s: float = 0.0
    h2d_bytes_per_s: float = 0.0
    latency_s: float = 0.0
    slowdown: float = 1.0
    jitter_s: float = 0.0
    seed: int = 0
    poison: bool = False
    strict: bool = True
    races: bool = False
    trace: bool = False
    fragmentation: bool = False
    queue_depth: int = 1024
    devices: int = 1

    def __post_init__(self) -> None:
        most = _host_memory_bytes()
        if self.capacity_bytes <= 0:
            raise BadArgument(f"capacity {self.capacity_bytes} leaves the device no memory: pass bytes, such as '2GiB'")
        if most is not None and self.capacity_bytes * self.devices > most:
            raise BadArgument(
                f"capacity {format_bytes(self.capacity_bytes)} on each of {self.devices} device(s) is more than this "
                f"machine's memory of {format_bytes(most)}: pass less"
            )
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "latency_s", "jitter_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadArgument(f"{name} is {getattr(self, name)}: pass a number that is not negative")
        if not 1 <= self.slowdown < float("inf"):
            raise BadArgument(f"slowdown is {self.slowdown}: pass 1 or more, it multiplies the time of every kernel")
        if not 1 <= self.devices <= MAX_DEVICES:
            raise BadArgument(f"devices is {self.devices}: pass 1 to {MAX_DEVICES}")
        if self.queue_depth < 1:
            raise BadArgument(f"queue_depth is {self.queue_depth}: pass 1 or more launches")
        if not 0 <= self.seed < 2**63:
            raise BadArgument(f"seed is {self.seed}: pass a number that is not negative and below 2**63")


class Emulator:
    """The simulated device of this process: change its knobs, read its counters."""

    def __init__(self, native: Native, settings: Settings) -> None:
        self._native = native
        self._settings = settings
        self._asked: Callable[[int, int], bool] | None = None
        native.set_devices(settings.devices, _reserve_bytes())
        self._apply(settings)

    def __repr__(self) -> str:
        s = self._settings
        return f"<lowtide.emulator: {s.devices} device(s) '{NAME}' of {format_bytes(s.capacity_bytes)}>"

    @property
    def settings(self) -> Settings:
        """The knobs as they are set."""
        return self._settings

    def configure(self, *, capacity: int | str | None = None, preset: str | None = None, **knobs: Any) -> Settings:
        """Change knobs while the device is in use; return all of them.

        Takes what `enable` takes except `devices`. What is queued already keeps the old knobs or gets the new ones.
        """
        changes = _read(capacity, preset, knobs)
        if changes.get("devices", self._settings.devices) != self._settings.devices:
            raise BadArgument("the number of devices is fixed once the emulator is enabled: start another process")
        try:
            settings = replace(self._settings, **changes)
        except TypeError:
            raise BadArgument(_unknown(changes)) from None
        self._apply(settings)
        return settings

    def stats(self, device: int = 0) -> Stats:
        """Return a device's memory now, and what it did since the last reset."""
        self._check(device)
        return self._native.stats(device)

    def reset_stats(self) -> None:
        """Start again: peaks fall to what is live, totals to zero, the trace to nothing."""
        for device in range(self._settings.devices):
            self._native.reset_stats(device)
        self._native.trace_clear()

    def trace(self) -> list[TraceRecord]:
        """Return a record of each kernel and copy that ended while `trace` was on, oldest first."""
        return sorted(self._native.trace(), key=lambda record: record.start_s)

    def races(self) -> tuple[str, ...]:
        """Return what the race detector found since it was asked last, one line for each pair, and forget it."""
        return self._native.take_races()

    def host_access(self, tensor: torch.Tensor, *, write: bool, name: str) -> None:
        """Tell the race detector that this thread reads or writes a host tensor by other means than an operator.

        Operators on pinned tensors are seen without it; a thread that hands a buffer's address to a file is not.
        """
        self._native.host_access(tensor.data_ptr(), tensor.nbytes, write=write, name=name)

    def set_pressure_callback(self, callback: Callable[[int, int], bool] | None) -> None:
        """Ask `callback(device, need_bytes)` before an allocation is refused; True: something was freed, try again.

        It is called on the thread that allocates, which may be one of autograd's, in the middle of an operator and with
        no lock held. It must not allocate device memory that may be refused itself: that is then refused at once.
        """
        if self._asked is not None:
            self._native.ask_for_room(self._asked, asked=False)
        self._asked = callback
        if callback is not None:
            self._native.ask_for_room(callback)

    def _apply(self, settings: Settings) -> None:
        native = self._native
        native.set_capacity(settings.capacity_bytes)
        native.set_bandwidth(settings.h2d_bytes_per_s, settings.d2h_bytes_per_s)
        native.set_latency(settings.latency_s)
        native.set_slowdown(settings.slowdown)
        native.set_jitter(settings.jitter_s, settings.seed)
        native.set_poison(settings.poison)
        native.set_strict(settings.strict)
        native.set_fragmentation(settings.fragmentation)
        native.set_queue_depth(settings.queue_depth)
        native.trace_enable(settings.trace)
        native.watch_races(settings.races)
        self._settings = settings

    def _check(self, device: int) -> None:
        if not 0 <= device < self._settings.devices:
            raise BadArgument(f"there is no device {NAME}:{device}: the emulator has {self._settings.devices}")


_current: Emulator | None = None


def current() -> Emulator | None:
    """Return the emulator of this process, or None if it is not enabled."""
    return _current


def enable(
    capacity: int | str = "2GiB",
    *,
    preset: str | None = None,
    d2h_bytes_per_s: float | None = None,
    h2d_bytes_per_s: float | None = None,
    latency_s: float | None = None,
    slowdown: float = 1.0,
    jitter_s: float = 0.0,
    seed: int = 0,
    poison: bool = False,
    strict: bool = True,
    races: bool = False,
    trace: bool = False,
    fragmentation: bool = False,
    queue_depth: int = 1024,
    devices: int = 1,
) -> Emulator:
    """Add the device `sim` to this process's PyTorch and return the emulator. `Settings` explains the knobs.

    `preset` names a GPU whose ratio of link to compute is kept; rates that are stated as well win over it. A device
    cannot be removed again: enabling it once more with the same knobs returns the same emulator, with others raises
    BadArgument. Built on first use with g++; raises NativeUnavailable where that cannot be.
    """
    global _current
    knobs = {
        "d2h_bytes_per_s": d2h_bytes_per_s,
        "h2d_bytes_per_s": h2d_bytes_per_s,
        "latency_s": latency_s,
        "slowdown": slowdown,
        "jitter_s": jitter_s,
        "seed": seed,
        "poison": poison,
        "strict": strict,
        "races": races,
        "trace": trace,
        "fragmentation": fragmentation,
        "queue_depth": queue_depth,
        "devices": devices,
    }
    settings = Settings(**_read(capacity, preset, knobs))
    if _current is not None:
        if _current.settings != settings:
            raise BadArgument(
                "the emulator is enabled already, with other settings: change them with "
                "lowtide.emulator.current().configure(...)"
            )
        return _current
    _register()
    from lowtide.emulator.bindings import load

    emulator = Emulator(load(), settings)
    from lowtide.emulator.torch_module import install

    install(settings.devices)
    try:
        _run_backward(settings.devices)
    except RuntimeError:
        raise BadArgument(
            "PyTorch's autograd started in this process before the device existed, and will not know it: "
            "enable the emulator before the first backward()"
        ) from None
    _current = emulator
    atexit.register(_let_autograd_finish)
    return _current


def check(capacity: int | str, *, preset: str | None = None) -> None:
    """Raise BadArgument for a capacity or a preset that `enable` would refuse, without importing torch."""
    if preset is not None:
        find_preset(preset)
    Settings(**_read(capacity, None, {}))


def _register() -> None:
    import torch

    # The name is a process-wide slot of PyTorch's; the first to take it keeps it.
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", NAME):
        raise BadArgument(
            f"another backend, {taken!r}, holds PyTorch's slot for out-of-tree devices in this process: "
            f"enable {NAME!r} in a process that does not import it"
        )
    torch.utils.backend_registration.rename_privateuse1_backend(NAME)


def _read(capacity: int | str | None, preset: str | None, knobs: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Settings that are stated; what a preset says comes first, what is stated overrides it."""
    stated = {name: value for name, value in knobs.items() if value is not None}
    found: dict[str, Any] = {}
    if preset is not None:
        gpu = find_preset(preset)
        scale = gpu.scale(cpu_flops_per_s())
        found["d2h_bytes_per_s"] = gpu.d2h_bytes_per_s * scale
        found["h2d_bytes_per_s"] = gpu.h2d_bytes_per_s * scale
        found["latency_s"] = gpu.latency_s
    if capacity is not None:
        try:
            found["capacity_bytes"] = parse_bytes(capacity)
        except ValueError as error:
            raise BadArgument(f"capacity: {error}") from None
    return found | stated


def _unknown(changes: dict[str, Any]) -> str:
    known = list(Settings.__dataclass_fields__)
    name = next((name for name in changes if name not in known), "")
    return f"unknown knob {name!r}: use capacity, preset, {', '.join(known[1:-1])}"


@cache
def cpu_flops_per_s() -> float:
    """Measure this CPU's single-precision matrix product once, with as many threads as PyTorch uses now."""
    import torch

    size, rounds = 1024, 5
    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    best_s = float("inf")
    for _ in range(rounds):
        begin_s = time.perf_counter()
        torch.mm(a, b)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * size**3 / best_s


def _host_memory_bytes() -> int | None:
    limits = memory_limits()
    return min(limit.limit_bytes for limit in limits) if limits else None


def _reserve_bytes() -> int:
    return max(_RESERVE_MIN_BYTES, _RESERVE_PER_MEMORY * (_host_memory_bytes() or 0))


def _let_autograd_finish() -> None:
    """Wait until the device's autograd thread has let go of the last graph that needs the interpreter.

    backward() returns before that thread lets go of the graph, for which it takes the interpreter's lock. If the
    interpreter is gone by then, the process aborts (pytorch issue 38230). The thread takes its tasks in order: when it
    has run another, the one before is gone. That other one must need no lock: its tensors are kept, and the engine is
    called directly, because torch.autograd.backward stores an object of Python's in the task.
    """
    if _current is not None and not _current._native.forked():
        _run_backward(_current.settings.devices)


def _run_backward(devices: int) -> None:
    """Let each device's autograd thread do next to nothing."""
    import torch

    for index in range(devices):
        leaf, gradient = (torch.empty(0, device=f"{NAME}:{index}") for _ in range(2))
        result = leaf.requires_grad_() * 1
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((result,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        _kept.extend((leaf, leaf.grad, result, gradient))
        torch.accelerator.synchronize(index)


_kept: list[object] = []
