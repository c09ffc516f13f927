"""Machines by name, each figure with its source, for planning and simulating what is not at hand.

`flops_per_s` are single-precision peaks without tensor cores, since the zoo's traces are in that precision; what
operators reach of them is `predict.Shares`. The tier "spill" is what lies below fast memory: host memory below a GPU,
a disk below a CPU. Where a machine names "disk" too, that is the tier below the host's memory.

Figures that were not measured are scaled from measured ones, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.core.machine import Access, Link, Machine
from lowtide.core.spelling import did_you_mean
from lowtide.errors import BadArgument

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A machine, what it is in words, and where each of its figures comes from."""

    machine: Machine
    title: str
    sources: Mapping[str, str]


# SmartPool and AutoSwap's link (Apache SINGA): out 47.2 us + 0.0756 ns/B, in 9.7 us + 0.0823 ns/B on PCIe 3.0 x16.
_PCIE3 = Link(
    write_bytes_per_s=13.2e9, read_bytes_per_s=12.2e9, write_latency_s=47.2e-6, read_latency_s=9.7e-6, duplex=True
)
_PCIE3_SOURCE = "measured on PCIe 3.0 x16 by Zhang et al. (SmartPool, AutoSwap), in Apache SINGA: 13.2 / 12.2 GB/s"


def _pcie(factor: float) -> Link:
    """Return a link of `factor` times the lanes' rate of PCIe 3.0 x16, with the latency that was measured there."""
    return Link(
        write_bytes_per_s=_PCIE3.write_bytes_per_s * factor,
        read_bytes_per_s=_PCIE3.read_bytes_per_s * factor,
        write_latency_s=_PCIE3.write_latency_s,
        read_latency_s=_PCIE3.read_latency_s,
        duplex=True,
    )


_PCIE4_SOURCE = "PCIe 3.0's measured rate, doubled with the lanes' (16 GT/s); not measured"
_PCIE4_X8_SOURCE = "PCIe 4.0 with 8 lanes: PCIe 3.0 x16's measured rate; not measured"
_PCIE5_SOURCE = "PCIe 3.0's measured rate, times four with the lanes' (32 GT/s); not measured"

# A data-centre NVMe disk: Samsung PM1733 data sheet, sequential 7.0 GB/s read, 3.8 GB/s write; latency 100 us assumed.
_NVME = Link(write_bytes_per_s=3.8e9, read_bytes_per_s=7.0e9, write_latency_s=1e-4, read_latency_s=1e-4)
_NVME_SOURCE = "Samsung PM1733 data sheet: 3.8 GB/s write, 7.0 GB/s read, sequential; latency assumed"

# The survey's UVMSmart configuration uses 45 us a fault, within the 20 to 50 us reported for unified memory.
_FAULT_S = 45e-6
_FAULT_SOURCE = "as UVMSmart's simulator is set (Ganguly et al.); 20 to 50 us are reported"


def _gpu(
    name: str,
    title: str,
    *,
    tflops: float,
    memory_gb_per_s: float,
    capacity_gib: int,
    link: Link,
    link_source: str,
    source: str,
    disk: bool = False,
) -> Preset:
    links = {"spill": link}
    sources = {"flops_per_s": source, "memory_bytes_per_s": source, "capacity_bytes": source, "spill": link_source}
    if disk:
        links["disk"], sources["disk"] = _NVME, _NVME_SOURCE
    sources["page_fault_s"] = _FAULT_SOURCE
    machine = Machine(
        name=name,
        links=links,
        copy_bytes_per_s=memory_gb_per_s * 1e9 / 2,  # a copy reads and writes
        source=f"preset: {source}",
        flops_per_s=tflops * 1e12,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        capacity_bytes=capacity_gib * GIB,
        page_fault_s=_FAULT_S,
    )
    return Preset(machine=machine, title=title, sources=sources)


def _host(
    name: str,
    title: str,
    *,
    gflops: float,
    memory_gb_per_s: float,
    capacity_gib: int,
    link: Link,
    page_fault_s: float,
    sources: Mapping[str, str],
) -> Preset:
    machine = Machine(
        name=name,
        links={"spill": link},
        copy_bytes_per_s=memory_gb_per_s * 1e9 / 2,
        source=f"preset: {sources['flops_per_s']}",
        flops_per_s=gflops * 1e9,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        capacity_bytes=capacity_gib * GIB,
        page_bytes=4096,
        page_fault_s=page_fault_s,
    )
    return Preset(machine=machine, title=title, sources=sources)


_CASCADE_LAKE = "one Xeon Platinum 8260: 24 cores, AVX-512 with 2 FMA units (Intel ARK), at an assumed 2.0 GHz"
_SERVER_MEMORY = "6 channels of DDR4-2933: 6 x 23.5 GB/s"
_ETHERNET = "line rate, without loss to protocols; latency of 3 us, as of RDMA within a rack, assumed"

# Izraelevitz et al., arXiv 1903.05714: six interleaved modules, sequential, at the best number of threads.
_OPTANE_IN_PLACE = Access(
    read_bytes_per_s=39.4e9, write_bytes_per_s=13.9e9, mixed_share=0.7, latency_s=3.05e-7, own_channel=False
)
_OPTANE_SOURCE = (
    "in place 39.4 GB/s read (from 17 threads on) and 13.9 GB/s write (saturated by 4 threads, no more with more), "
    "305 ns a random read: Izraelevitz et al., arXiv 1903.05714, six interleaved modules; they report that mixed "
    "traffic collapses, of which 0.7 is left here (assumed)"
)


def _optane(*, write_bytes_per_s: float, read_bytes_per_s: float) -> Link:
    """Return Optane with these rates of copies beside operators, and AutoTM's of copies that the program waits for."""
    return Link(
        write_bytes_per_s=write_bytes_per_s,
        read_bytes_per_s=read_bytes_per_s,
        write_latency_s=2e-5,
        read_latency_s=2e-5,
        waited_write_bytes_per_s=12e9,
        waited_read_bytes_per_s=29e9,
        capacity_bytes=768 * GIB,
        access=_OPTANE_IN_PLACE,
    )


_WAITED_SOURCE = "copies that the program waits for, 12 GB/s out and 29 GB/s in: AutoTM's artefact"
_RUN_SOURCE = "20 us a run of pages, assumed"

_ALL = (
    _gpu(
        "k40c",
        "Tesla K40c, PCIe 3.0 x16",
        tflops=4.29,
        memory_gb_per_s=288,
        capacity_gib=12,
        link=_PCIE3,
        link_source=_PCIE3_SOURCE,
        source="NVIDIA Tesla K40 board specification (base clock)",
    ),
    _gpu(
        "titan-x",
        "GeForce GTX Titan X (Maxwell), PCIe 3.0 x16: the machine of vDNN",
        tflops=7.0,
        memory_gb_per_s=336,
        capacity_gib=12,
        link=_PCIE3,
        link_source=_PCIE3_SOURCE,
        source="Rhu et al., vDNN, MICRO 2016: 7 TFLOPS, 336 GB/s, 12 GB",
    ),
    _gpu(
        "v100",
        "Tesla V100 PCIe 16 GB, PCIe 3.0 x16",
        tflops=14.0,
        memory_gb_per_s=900,
        capacity_gib=16,
        link=_PCIE3,
        link_source=_PCIE3_SOURCE,
        source="NVIDIA V100 data sheet (PCIe)",
        disk=True,
    ),
    _gpu(
        "v100-nvlink",
        "Tesla V100 SXM2 16 GB in an IBM AC922, three NVLink 2.0 to the CPU",
        tflops=15.7,
        memory_gb_per_s=900,
        capacity_gib=16,
        link=Link(
            write_bytes_per_s=75e9, read_bytes_per_s=75e9, write_latency_s=1e-5, read_latency_s=1e-5, duplex=True
        ),
        link_source="specification: 3 x 25 GB/s each way (150 GB/s both ways); latency of 10 us assumed",
        source="NVIDIA V100 data sheet (NVLink)",
        disk=True,
    ),
    _gpu(
        "a100",
        "A100 PCIe 40 GB, PCIe 4.0 x16",
        tflops=19.5,
        memory_gb_per_s=1555,
        capacity_gib=40,
        link=_pcie(2),
        link_source=_PCIE4_SOURCE,
        source="NVIDIA A100 data sheet (PCIe 40 GB, FP32)",
        disk=True,
    ),
    _gpu(
        "h100",
        "H100 PCIe 80 GB, PCIe 5.0 x16",
        tflops=51.0,
        memory_gb_per_s=2000,
        capacity_gib=80,
        link=_pcie(4),
        link_source=_PCIE5_SOURCE,
        source="NVIDIA H100 data sheet (PCIe, FP32)",
        disk=True,
    ),
    _gpu(
        "gtx1080",
        "GeForce GTX 1080 8 GB, PCIe 3.0 x16",
        tflops=8.9,
        memory_gb_per_s=320,
        capacity_gib=8,
        link=_PCIE3,
        link_source=_PCIE3_SOURCE,
        source="NVIDIA GeForce GTX 1080 white paper",
    ),
    _gpu(
        "rtx2080ti",
        "GeForce RTX 2080 Ti 11 GB, PCIe 3.0 x16",
        tflops=13.4,
        memory_gb_per_s=616,
        capacity_gib=11,
        link=_PCIE3,
        link_source=_PCIE3_SOURCE,
        source="NVIDIA Turing architecture white paper (reference boost clock)",
    ),
    _gpu(
        "rtx3060",
        "GeForce RTX 3060 12 GB, PCIe 4.0 x16",
        tflops=12.7,
        memory_gb_per_s=360,
        capacity_gib=12,
        link=_pcie(2),
        link_source=_PCIE4_SOURCE,
        source="NVIDIA GeForce RTX 3060 specifications (3584 cores at 1.78 GHz)",
    ),
    _gpu(
        "rtx4060ti-16gb",
        "GeForce RTX 4060 Ti 16 GB, PCIe 4.0 x8",
        tflops=22.1,
        memory_gb_per_s=288,
        capacity_gib=16,
        link=_pcie(1),
        link_source=_PCIE4_X8_SOURCE,
        source="NVIDIA GeForce RTX 4060 Ti specifications (4352 cores at 2.54 GHz)",
    ),
    _gpu(
        "rtx3090",
        "GeForce RTX 3090 24 GB, PCIe 4.0 x16",
        tflops=35.6,
        memory_gb_per_s=936,
        capacity_gib=24,
        link=_pcie(2),
        link_source=_PCIE4_SOURCE,
        source="NVIDIA Ampere GA102 white paper",
    ),
    _gpu(
        "rtx4090",
        "GeForce RTX 4090 24 GB, PCIe 4.0 x16",
        tflops=82.6,
        memory_gb_per_s=1008,
        capacity_gib=24,
        link=_pcie(2),
        link_source=_PCIE4_SOURCE,
        source="NVIDIA Ada architecture white paper",
    ),
    _host(
        "cpu",
        "2 cores with AVX-512 and a file on a virtual disk: the machine of docs/benchmarks.md",
        gflops=320,
        memory_gb_per_s=14,
        capacity_gib=24,
        link=Link(write_bytes_per_s=2.4e9, read_bytes_per_s=2.3e9, write_latency_s=2e-4, read_latency_s=2e-4),
        page_fault_s=2.5e-4,
        sources={
            "flops_per_s": "fitted to the step times of docs/benchmarks.md; see docs/estimate.md",
            "memory_bytes_per_s": "fitted likewise",
            "capacity_bytes": "as it has",
            "spill": "measured, O_DIRECT, 8 MiB requests, two threads: 1.8 to 3.1 GB/s write, 1.9 to 2.8 GB/s read",
            "page_fault_s": "one small read of the file: its latency and a fault; assumed",
        },
    ),
    _host(
        "dram-optane",
        "a server socket with DRAM above Optane persistent memory",
        gflops=3072,
        memory_gb_per_s=141,
        capacity_gib=192,
        link=Link(write_bytes_per_s=12e9, read_bytes_per_s=29e9, write_latency_s=1e-6, read_latency_s=1e-6),
        page_fault_s=2e-6,
        sources={
            "flops_per_s": _CASCADE_LAKE,
            "memory_bytes_per_s": _SERVER_MEMORY,
            "capacity_bytes": "6 modules of 32 GiB, assumed",
            "spill": "AutoTM (Hildebrand et al., ASPLOS 2020): synchronous copies, 12 GB/s to and 29 GB/s from Optane",
            "page_fault_s": "a page moved by the kernel, assumed",
        },
    ),
    _host(
        "optane",
        "a server socket with Optane persistent memory that operators read in place",
        gflops=3072,
        memory_gb_per_s=106,
        capacity_gib=192,
        link=_optane(write_bytes_per_s=10e9, read_bytes_per_s=10e9),
        page_fault_s=2e-6,
        sources={
            "flops_per_s": _CASCADE_LAKE,
            "memory_bytes_per_s": "Izraelevitz et al., arXiv 1903.05714: 105.9 GB/s read from six modules of DDR4",
            "capacity_bytes": "6 modules of 32 GiB, assumed; 6 of 128 GiB Optane",
            "spill": f"{_OPTANE_SOURCE}; copies beside operators 10 GB/s each way, the rate that Sentinel migrates "
            f"with, assumed; {_WAITED_SOURCE}; {_RUN_SOURCE}",
            "page_fault_s": "a page moved by the kernel, assumed",
        },
    ),
    _host(
        "optane-autotm",
        "the same with AutoTM's copies beside operators, which are slow",
        gflops=3072,
        memory_gb_per_s=106,
        capacity_gib=192,
        link=_optane(write_bytes_per_s=2.5e9, read_bytes_per_s=2.0e9),
        page_fault_s=2e-6,
        sources={
            "flops_per_s": _CASCADE_LAKE,
            "memory_bytes_per_s": "Izraelevitz et al., arXiv 1903.05714: 105.9 GB/s read from six modules of DDR4",
            "capacity_bytes": "6 modules of 32 GiB, assumed; 6 of 128 GiB Optane",
            "spill": f"{_OPTANE_SOURCE}; copies beside operators 2.5 GB/s out and 2.0 GB/s in: AutoTM's artefact; "
            f"{_WAITED_SOURCE}; {_RUN_SOURCE}",
            "page_fault_s": "a page moved by the kernel, assumed",
        },
    ),
    _host(
        "cxl",
        "a server socket with a CXL memory expander that operators read in place",
        gflops=3072,
        memory_gb_per_s=230,
        capacity_gib=256,
        link=Link(
            write_bytes_per_s=18e9,
            read_bytes_per_s=18e9,
            write_latency_s=2e-5,
            read_latency_s=2e-5,
            duplex=True,
            waited_write_bytes_per_s=22e9,
            waited_read_bytes_per_s=26e9,
            capacity_bytes=512 * GIB,
            access=Access(
                read_bytes_per_s=26e9, write_bytes_per_s=22e9, mixed_share=1.0, latency_s=2.5e-7, own_channel=True
            ),
        ),
        page_fault_s=2e-6,
        sources={
            "flops_per_s": _CASCADE_LAKE,
            "memory_bytes_per_s": "8 channels of DDR5-4800: 75% of 8 x 38.4 GB/s, assumed",
            "capacity_bytes": "8 modules of 32 GiB, assumed; 512 GiB below",
            "spill": "PCIe 5.0 x8 has 31.5 GB/s each way; 82% of it in reads and 70% in writes, 250 ns, each way "
            "beside the other and beside DRAM: assumed, not measured; copies beside operators 18 GB/s, assumed; "
            + _RUN_SOURCE,
            "page_fault_s": "a page moved by the kernel, assumed",
        },
    ),
    _host(
        "hbm-dram",
        "Xeon Phi 7250 with 16 GB of MCDRAM above DDR4",
        gflops=6092,
        memory_gb_per_s=490,
        capacity_gib=16,
        link=Link(write_bytes_per_s=45e9, read_bytes_per_s=45e9, write_latency_s=1e-6, read_latency_s=1e-6),
        page_fault_s=2e-6,
        sources={
            "flops_per_s": "Intel ARK: 68 cores at 1.4 GHz, AVX-512 with 2 FMA units",
            "memory_bytes_per_s": "STREAM triad in flat mode, as Intel publishes it for the 7250",
            "capacity_bytes": "Intel ARK",
            "spill": "STREAM triad on DDR4 is about 90 GB/s; halved, since a copy shares it with compute; assumed",
            "page_fault_s": "a page moved by the kernel, assumed",
        },
    ),
    _host(
        "remote-25gbe",
        "a server socket with another machine's memory over 25 Gb/s Ethernet",
        gflops=3072,
        memory_gb_per_s=141,
        capacity_gib=64,
        link=Link(
            write_bytes_per_s=3.125e9, read_bytes_per_s=3.125e9, write_latency_s=3e-6, read_latency_s=3e-6, duplex=True
        ),
        page_fault_s=6e-6,
        sources={
            "flops_per_s": _CASCADE_LAKE,
            "memory_bytes_per_s": _SERVER_MEMORY,
            "capacity_bytes": "assumed",
            "spill": _ETHERNET,
            "page_fault_s": "a fault and an RDMA read of 4 KiB, assumed",
        },
    ),
    _host(
        "remote-100gbe",
        "a server socket with another machine's memory over 100 Gb/s Ethernet",
        gflops=3072,
        memory_gb_per_s=141,
        capacity_gib=64,
        link=Link(
            write_bytes_per_s=12.5e9, read_bytes_per_s=12.5e9, write_latency_s=3e-6, read_latency_s=3e-6, duplex=True
        ),
        page_fault_s=6e-6,
        sources={
            "flops_per_s": _CASCADE_LAKE,
            "memory_bytes_per_s": _SERVER_MEMORY,
            "capacity_bytes": "assumed",
            "spill": _ETHERNET,
            "page_fault_s": "a fault and an RDMA read of 4 KiB, assumed",
        },
    ),
)

PRESETS: dict[str, Preset] = {preset.machine.name: preset for preset in _ALL}


def preset(name: str) -> Preset:
    """Return the preset of that name; capitals, spaces and underscores do not matter."""
    found = PRESETS.get(name.lower().replace("_", "-").replace(" ", "-"))
    if found is None:
        meant = did_you_mean(name.lower(), PRESETS)
        raise BadArgument(f"unknown machine {name!r}{meant or ':'} the presets are {', '.join(PRESETS)}")
    return found


def machine(name: str) -> Machine:
    """Return the machine of that name."""
    return preset(name).machine
