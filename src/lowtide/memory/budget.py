"""What the user's budget means in bytes, and what "auto" may take on this machine.

"auto" is the tensor memory this process may hold: the least that any limit above it still leaves, plus what its tensors
hold already (those bytes are in every usage counter), less a margin. The limits are

- the host's available memory,
- every memory cgroup from the process's own up to the root, v1 and v2 alike: `limit - usage`, where page cache that the
  kernel would drop first (`inactive_file`) does not count as usage,
- the process's own RLIMIT_DATA and RLIMIT_AS.

The margin is a tenth, and at least 256 MiB: threads' stacks, library scratch, and neighbours that grow.

Several ranks of one job share a machine: "auto" is an equal part for each, and a stated budget is for each of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lowtide.core.units import format_bytes, parse_bytes
from lowtide.errors import BadArgument

MARGIN_SHARE = 0.1
MARGIN_MIN_BYTES = 256 * 2**20

# Fewer bytes than this without a unit are a unit that was forgotten.
_LEAST_WITHOUT_UNIT = 2**20
# More of them than this were meant as MiB.
_MOST_GIB = 512

# v1 writes "no limit" as the largest page-aligned signed 64-bit number; nothing real comes near.
_V1_UNLIMITED_BYTES = 2**60

BudgetLike = int | str | Mapping[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """A budget in bytes for each tier; `disk_bytes` and `slow_bytes` None mean as much as there is.

    Fast memory is the CPU's, or an accelerator's where the budget is stated for one: then `host_bytes` is for the
    pinned memory below it (None: not stated), and `devices` are the budgets of single devices, such as ("cuda:1",
    2**30).
    """

    fast_bytes: int
    disk_bytes: int | None = None
    slow_bytes: int | None = None
    host_bytes: int | None = None
    devices: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """One limit on this process's memory: its source, its size, and the bytes left.

    `shared`: with other processes, those of the same job among them.
    """

    source: str
    limit_bytes: int
    left_bytes: int
    shared: bool = True

    def left_for(self, ranks: int) -> int:
        """Return what it leaves to each of several ranks on this machine."""
        return self.left_bytes // ranks if self.shared else self.left_bytes


# How launchers say how many processes of a job run on a machine: torchrun and Accelerate, Open MPI, MPICH, Slurm.
_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes of this job share the machine, as their launcher says; 1 where none does."""
    for name in _RANKS:
        stated = environment.get(name, "")
        if stated.isdecimal() and int(stated) > 0:
            return int(stated)
    return 1


def capacity_bytes(*, root: Path = Path("/")) -> int | None:
    """Return the memory that the processes here share: the host's, or the tightest cgroup's (None: not known)."""
    return min((limit.limit_bytes for limit in memory_limits(root=root) if limit.shared), default=None)


def check_ranks(nbytes: int, *, ranks: int | None = None, root: Path = Path("/")) -> None:
    """Refuse a budget that all ranks on this machine together could not have."""
    ranks = local_ranks() if ranks is None else ranks
    shared = [limit for limit in memory_limits(root=root) if limit.shared]
    if ranks < 2 or not shared:
        return
    tightest = min(shared, key=lambda limit: limit.limit_bytes)
    if ranks * nbytes > tightest.limit_bytes:
        raise BadArgument(
            f"{ranks} ranks share this machine, and a budget of {format_bytes(nbytes)} for each comes to "
            f"{format_bytes(ranks * nbytes)}, more than the {format_bytes(tightest.limit_bytes)} of "
            f"{tightest.source}: state at most {format_bytes(tightest.limit_bytes // ranks)}, or 'auto' to divide "
            "what there is"
        )


def names_accelerator(budget: BudgetLike) -> bool:
    """Tell whether a budget is stated for accelerators: `{"device": ...}`, or by device as in `{"cuda:0": ...}`."""
    return isinstance(budget, Mapping) and any(_is_device(key) for key in budget)


def named_devices(budget: BudgetLike) -> tuple[str, ...]:
    """Return the devices that a budget names one by one, such as "cuda:0"."""
    return tuple(key for key in budget if _DEVICE.fullmatch(key)) if isinstance(budget, Mapping) else ()


def device_count(budget: BudgetLike) -> int:
    """Return how many devices a machine needs for every one that a budget names to exist."""
    return max((1 + int(name.partition(":")[2]) for name in named_devices(budget)), default=1)


def parse_device_budget(
    budget: BudgetLike, *, free_bytes: Callable[[], int], held_bytes: int = 0, root: Path = Path("/")
) -> Budgets:
    """Return what `budget` allows on an accelerator and below it; the same forms, and {"device": ..., "cpu": ...}.

    "auto" is what the device has free, `free_bytes()`, plus what this process's tensors hold there, less a margin.
    `devices` of the result are the budgets stated by device; without "device", its `fast_bytes` is the largest of them.
    """

    def device_bytes(value: object, what: str) -> int:
        if (share := _share_of_auto(value, what=what)) is not None:
            usable = free_bytes() + held_bytes
            return int((usable - int(usable * MARGIN_SHARE)) * share)
        return _positive_bytes(value, what=what)

    if not isinstance(budget, Mapping):
        return Budgets(fast_bytes=device_bytes(budget, "budget"))
    unknown = [key for key in budget if key not in ("cpu", "disk") and not _is_device(key)]
    if unknown:
        raise BadArgument(
            f"unknown tier {unknown[0]!r} in the budget: use 'device', 'cpu' and 'disk', as in {_DEVICE_EXAMPLE}"
        )
    devices = tuple(
        (key, device_bytes(value, f"budget of {key}")) for key, value in budget.items() if _DEVICE.fullmatch(key)
    )
    if "device" not in budget and not devices:
        raise BadArgument(f"the budget names no 'device' bytes: state them, as in {_DEVICE_EXAMPLE}")
    host, disk = budget.get("cpu"), budget.get("disk")
    fast = device_bytes(budget["device"], "device budget") if "device" in budget else max(each for _, each in devices)
    return Budgets(
        fast_bytes=fast,
        host_bytes=None if host is None else _fast_bytes(host, held_bytes=0, root=root),
        disk_bytes=None if disk is None else _positive_bytes(disk, what="disk budget"),
        devices=devices,
    )


def parse_budget(budget: BudgetLike, *, held_bytes: int = 0, root: Path = Path("/")) -> Budgets:
    """Return what `budget` allows in each tier: bytes, "2GiB", "auto", or {"cpu": "2GiB", "disk": "40GiB"}.

    `held_bytes` is what this process's tensors hold now; only "auto" looks at it. `root` is where /proc and
    /sys/fs/cgroup are looked for. Raises BadArgument in one line that says what to pass instead.
    """
    if not isinstance(budget, Mapping):
        return Budgets(fast_bytes=_fast_bytes(budget, held_bytes=held_bytes, root=root))
    unknown = [key for key in budget if key not in ("cpu", "disk", "slow")]
    if unknown:
        raise BadArgument(f"unknown tier {unknown[0]!r} in the budget: use 'cpu' and 'disk', as in {_EXAMPLE}")
    if "cpu" not in budget:
        raise BadArgument(f"the budget names no 'cpu' bytes: state them, as in {_EXAMPLE}")
    disk, slow = budget.get("disk"), budget.get("slow")
    return Budgets(
        fast_bytes=_fast_bytes(budget["cpu"], held_bytes=held_bytes, root=root),
        disk_bytes=None if disk is None else _positive_bytes(disk, what="disk budget"),
        slow_bytes=None if slow is None else _positive_bytes(slow, what="slow memory's budget"),
    )


_EXAMPLE = "{'cpu': '2GiB', 'disk': '40GiB'}"
_DEVICE_EXAMPLE = "{'device': '6GiB', 'cpu': '8GiB', 'disk': '100GiB'}"
_DEVICE = re.compile(r"[a-z]+:[0-9]+")


def _is_device(key: object) -> bool:
    return isinstance(key, str) and (key == "device" or _DEVICE.fullmatch(key) is not None)


def auto_bytes(*, held_bytes: int = 0, root: Path = Path("/")) -> int:
    """Return the tensor memory this process may hold: the least any limit leaves, plus `held_bytes`, less a margin.

    Of what is shared with other ranks on this machine it is an equal part.
    """
    limits, ranks = memory_limits(root=root), local_ranks()
    if not limits:
        raise BadArgument("budget 'auto' needs /proc/meminfo, which this system lacks: state bytes, such as '2GiB'")
    tightest = min(limits, key=lambda limit: limit.left_for(ranks))
    usable = tightest.left_for(ranks) + held_bytes
    margin = max(int(usable * MARGIN_SHARE), MARGIN_MIN_BYTES)
    if usable <= margin:
        raise BadArgument(
            f"budget 'auto' finds {format_bytes(usable)} ({tightest.source}), not more than its margin of "
            f"{format_bytes(margin)}: free memory, raise that limit, or state bytes"
        )
    return usable - margin


def memory_limits(*, root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Return every bound on this process's memory that can be read under `root`."""
    return (*_host_limit(root), *_cgroup_limits(root), *_process_limits(root))


def _fast_bytes(budget: object, *, held_bytes: int, root: Path) -> int:
    if (share := _share_of_auto(budget, what="budget")) is not None:
        return int(auto_bytes(held_bytes=held_bytes, root=root) * share)
    return _positive_bytes(budget, what="budget")


def _share_of_auto(value: object, *, what: str) -> float | None:
    """Return which part of "auto" a text states: all of it, or "50%" (None: it states bytes)."""
    if not isinstance(value, str):
        return None
    text = value.strip().lower()
    if text == "auto":
        return 1.0
    if not text.endswith("%"):
        return None
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise BadArgument(f"{what} {value!r} is not a share of what 'auto' finds: write '50%', or bytes such as '2GiB'")
    return share


def _positive_bytes(value: object, *, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadArgument(f"{what} {value!r} does not state bytes: pass an int or a text such as '2GiB'")
    try:
        nbytes = parse_bytes(value)
    except ValueError as error:
        raise BadArgument(f"{what}: {error}") from None
    if isinstance(value, str) and not value.strip()[-1].isalpha() and 0 < float(value) < _LEAST_WITHOUT_UNIT:
        unit = "GiB" if nbytes <= _MOST_GIB else "MiB"
        raise BadArgument(f"{what} {value!r} would be {nbytes} bytes: add a unit, such as '{value.strip()}{unit}'")
    if nbytes <= 0:
        raise BadArgument(f"{what} {value!r} leaves no memory to work in: pass more than zero bytes, such as '2GiB'")
    return nbytes


def _host_limit(root: Path) -> Iterator[MemoryLimit]:
    fields = _fields(root / "proc/meminfo")
    if "MemAvailable" in fields:
        total = fields.get("MemTotal", fields["MemAvailable"])
        yield MemoryLimit(source="host memory", limit_bytes=total, left_bytes=fields["MemAvailable"])


def _process_limits(root: Path) -> Iterator[MemoryLimit]:
    used = _fields(root / "proc/self/status")
    for name, label, counter in (
        ("Max data size", "RLIMIT_DATA", "VmData"),
        ("Max address space", "RLIMIT_AS", "VmSize"),
    ):
        found = re.search(rf"^{name}\s+(\d+)\s", _text(root / "proc/self/limits"), re.MULTILINE)
        if found and counter in used:
            limit = int(found.group(1))
            yield MemoryLimit(source=label, limit_bytes=limit, left_bytes=max(0, limit - used[counter]), shared=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hierarchy:
    """A mounted cgroup hierarchy that may account memory: the files it uses, and where the process sits in it."""

    label: str
    mount: Path
    own: PurePosixPath
    limit_files: tuple[str, ...]
    usage_file: str
    cache_field: str


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    for hierarchy in _hierarchies(root):
        for group in (hierarchy.own, *hierarchy.own.parents):
            # A container may see its host's path here while its mount starts at its own group: then the deeper
            # levels do not exist below the mount, and the mount's root is the process's group.
            directory = hierarchy.mount / group.relative_to("/")
            usage = _number(directory / hierarchy.usage_file)
            if usage is None:
                continue
            dropped_first = _fields(directory / "memory.stat").get(hierarchy.cache_field, 0)
            for name in hierarchy.limit_files:
                limit = _number(directory / name)
                if limit is not None and limit < _V1_UNLIMITED_BYTES:
                    left = max(0, limit - max(0, usage - dropped_first))
                    yield MemoryLimit(source=f"{hierarchy.label} {group} {name}", limit_bytes=limit, left_bytes=left)


def _hierarchies(root: Path) -> Iterator[_Hierarchy]:
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    mounts = _cgroup_mounts(root)
    for kind, path in paths.items():
        # One entry of each kind is enough: a hierarchy mounted twice shows the same numbers.
        mount, mount_root = mounts.get(kind) or (_usual_mount(root, kind), "/")
        # "/../x" names a group outside the namespace's root, which cannot be read from here: the root is the nearest.
        own = PurePosixPath("/") if ".." in PurePosixPath(path).parts else PurePosixPath("/") / path
        if own.is_relative_to(mount_root):
            own = PurePosixPath("/") / own.relative_to(mount_root)
        if kind == "cgroup2":
            # memory.high throttles instead of killing, and training would crawl: it bounds as memory.max does.
            limit_files = ("memory.max", "memory.high")
            yield _Hierarchy(
                label="cgroup v2",
                mount=mount,
                own=own,
                limit_files=limit_files,
                usage_file="memory.current",
                cache_field="inactive_file",
            )
        else:
            yield _Hierarchy(
                label="cgroup v1",
                mount=mount,
                own=own,
                limit_files=("memory.limit_in_bytes",),
                usage_file="memory.usage_in_bytes",
                cache_field="total_inactive_file",
            )


def _usual_mount(root: Path, kind: str) -> Path:
    if kind == "cgroup":
        return root / "sys/fs/cgroup/memory"
    hybrid = root / "sys/fs/cgroup/unified"
    return hybrid if hybrid.is_dir() else root / "sys/fs/cgroup"


def _cgroup_mounts(root: Path) -> dict[str, tuple[Path, str]]:
    """Return, for "cgroup" (v1, memory) and "cgroup2", the mount point below `root` and the group it starts at."""
    found: dict[str, tuple[Path, str]] = {}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        places, kinds = before.split(), after.split()
        if len(places) < 5 or len(kinds) < 3:
            continue
        kind, options = kinds[0], kinds[2].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options):
            group, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text) for text in places[3:5])
            found.setdefault(kind, (root / point.lstrip("/"), group))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a "name: 12 kB" or "name 12" file, in bytes."""
    found = {}
    for name, number, unit in re.findall(r"^(\w+):?[ \t]+(\d+)[ \t]*(kB)?$", _text(path), re.MULTILINE):
        found[name] = int(number) * (1024 if unit else 1)
    return found
