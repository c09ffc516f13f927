"""`torch.sim`: what PyTorch, its checkpointing, autocast and FSDP expect of a device's module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from lowtide.emulator.bindings import load

_NAME = "sim"
_PRIVATE_USE = 20  # c10::DeviceType::PrivateUse1
_SEED_MASK = 2**63 - 1

# torch.utils.checkpoint keeps the device's random state only if this is true.
_initialized = True

DeviceLike = torch.device | int | str | None

memory_stats = torch.accelerator.memory_stats
memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
reset_accumulated_memory_stats = torch.accelerator.reset_accumulated_memory_stats
empty_cache = torch.accelerator.empty_cache
mem_get_info = torch.accelerator.get_memory_info
current_device = torch.accelerator.current_device_index
set_stream = torch.accelerator.set_stream


def install(devices: int) -> None:
    """Make this module `torch.sim`, and give tensors, modules and storages their methods for the device."""
    assert device_count() == devices
    torch._register_device_module(_NAME, sys.modules[__name__])  # type: ignore[no-untyped-call]  # torch does not type it
    torch.utils.backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)


def _index(device: DeviceLike) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def device_count() -> int:
    """Return how many devices there are."""
    return load().device_count()


def is_available() -> bool:
    """Return that there is one: the module exists only then."""
    return True


def is_initialized() -> bool:
    """Return that nothing remains to be set up."""
    return True


def init() -> None:
    """Do nothing: there is nothing to set up."""


def _lazy_init() -> None:
    """Do nothing: there is nothing to set up."""


def _is_in_bad_fork() -> bool:
    return bool(load().forked())


def set_device(device: DeviceLike) -> None:
    """Make a device the current one."""
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: DeviceLike = None) -> None:
    """Wait for everything that is queued on a device."""
    torch.accelerator.synchronize(_index(device))


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Let this process's tensors take at most that fraction of a device's memory, as the CUDA module does."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction of {fraction} of the memory is not valid: pass 0 to 1")
    total_bytes = int(torch.accelerator.get_memory_info(_index(device))[1])
    load().set_allowed(_index(device), 0 if fraction == 1 else int(fraction * total_bytes))


def set_pressure_callback(callback: Callable[[int], bool] | None, device: DeviceLike = None) -> None:
    """Ask `callback(lacking_bytes)` before an allocation on a device is refused; True: something was freed, try again.

    It is called on the thread that allocates, which may be one of autograd's, in the middle of an operator and with no
    lock held. It must not allocate device memory that may be refused itself: that is then refused at once.
    """
    if callback is None:
        _asked.pop(_index(device), None)
    else:
        _asked[_index(device)] = callback
    load().ask_for_room(ask)


_asked: dict[int, Callable[[int], bool]] = {}


def ask(index: int, lacking_bytes: int) -> bool:
    """Ask a device's callback for room."""
    callback = _asked.get(index)
    return callback is not None and callback(lacking_bytes)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return what autocast may use."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(*_: object) -> bool:
    """Return that bfloat16 works."""
    return True


class device(torch.accelerator.device_index):  # noqa: N801 - the name that every device module has
    """Make a device the current one inside a `with`."""

    def __init__(self, device: DeviceLike) -> None:
        super().__init__(_index(device))


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **given: Any) -> Stream:
        """Return a stream of the pool, or the one that `given` names."""
        if given:
            return super().__new__(cls, priority=priority, **given)
        return super().__new__(cls, device=torch.device(_NAME, _index(device)), priority=priority)


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        """Return an event that was not recorded yet."""
        return super().__new__(
            cls, device=torch.device(_NAME), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


class stream:  # noqa: N801 - the name that every device module has
    """Make a stream the current one inside a `with`; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._before: torch.Stream | None = None
        self._device = 0

    def __enter__(self) -> torch.Stream | None:
        if self._stream is not None:
            self._device = current_device()
            self._before = torch.accelerator.current_stream(self._stream.device)
            torch.accelerator.set_stream(self._stream)
        return self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            torch.accelerator.set_stream(self._before)
            set_device(self._device)


StreamContext = stream


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the stream that this thread queues on."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the stream that threads begin with."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_PRIVATE_USE)


def get_rng_state(device: DeviceLike = _NAME) -> torch.Tensor:
    """Return the state of a device's random numbers."""
    state: torch.Tensor = torch.ops.lowtide_sim.get_rng_state(_index(device))
    return state


def set_rng_state(state: torch.Tensor, device: DeviceLike = _NAME) -> None:
    """Set the state of a device's random numbers."""
    torch.ops.lowtide_sim.set_rng_state(state, _index(device))


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of every device's random numbers."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    """Set the state of every device's random numbers."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device's random numbers."""
    torch.ops.lowtide_sim.manual_seed(int(seed) & _SEED_MASK, _index(None))


def manual_seed_all(seed: int) -> None:
    """Seed every device's random numbers."""
    for index in range(device_count()):
        torch.ops.lowtide_sim.manual_seed(int(seed) & _SEED_MASK, index)


def seed_all() -> None:
    """Seed every device's random numbers with one of the host's."""
    manual_seed_all(torch.seed())


def initial_seed() -> int:
    """Return the host's first seed, which torch.manual_seed gives to the devices as well."""
    return torch.initial_seed()
