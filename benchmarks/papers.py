"""The headlines of the papers, again: each system's own model, batch, machine and memory in the simulator.

Traces are captured without executing, on the machine that the paper names or the nearest preset, so nothing here was
measured. Of each headline there are the published figure, ours, and ours again with costs that are less kind: operators
half as fast again, on the same link. Where that explains a difference, the page says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from benchmarks.jobs import ROOT
from benchmarks.pages import table, write_page
from lowtide import capture_model, registry
from lowtide.core.machine import Link, Machine
from lowtide.core.timeline import Timeline
from lowtide.core.trace import Reach, Trace
from lowtide.errors import BudgetTooSmall, PlanError
from lowtide.estimate.predict import with_durations
from lowtide.estimate.predictors.allocators import reserved_peak, stream_of
from lowtide.estimate.presets import machine
from lowtide.plan.policies.autoswap import AutoSwap
from lowtide.plan.policies.gruslys import cost
from lowtide.plan.policies.pooch import Pooch
from lowtide.plan.policies.unified_memory import paging
from lowtide.plan.policy import Policy
from lowtide.plan.views.pools import blocks_of, colour
from lowtide.report import problem_of, settle

GIB = 1 << 30
# How much faster operators are where costs are less kind; the default shares are below what the best kernels reach.
FASTER = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A figure that a paper states, and ours. `published`: the figure, or the ends of a range.

    `less_kind`: ours with operators `FASTER` times as fast. `unit`: "loss" is the share of the throughput that is lost
    against a machine with memory for everything, "saved" the share of memory, "times" a ratio.
    """

    system: str
    setting: str
    unit: str
    published: tuple[float, float]
    ours: float
    less_kind: float | None = None
    source: str
    why: str


def shown(value: float, unit: str) -> str:
    """Return a figure as the page shows it."""
    return f"{value:.2f}x" if unit == "times" else f"{value:.0%}"


@cache
def trace_of(
    name: str,
    batch: int,
    on: str,
    *,
    touched: bool = False,
    dtype: str = "float32",
    sizes: tuple[tuple[str, int], ...] = (),
) -> Trace:
    """Return a model's step on a preset, from shapes alone."""
    reach = Reach.TOUCHED if touched else Reach.SAVED
    return capture_model(name, batch=batch, fake=True, machine=machine(on), reach=reach, dtype=dtype, **dict(sizes))


def step_of(trace: Trace, policy: Policy | str, *, on: Machine, budget_bytes: int, faster: float = 1.0) -> Timeline:
    """Return the step of a trace under a policy."""
    found = registry.policy(policy) if isinstance(policy, str) else policy
    quick = trace if faster == 1.0 else with_durations(trace, lambda _, op: op.duration_s / faster)
    return settle(problem_of(quick, on, budget_bytes=budget_bytes, keep_times=True), found).timeline


def loss(trace: Trace, policy: Policy | str, *, on: Machine, budget_bytes: int, faster: float = 1.0) -> float:
    """Return the share of the throughput that a budget costs."""
    step = step_of(trace, policy, on=on, budget_bytes=budget_bytes, faster=faster)
    return 1 - trace.duration_s / faster / step.step_s


def fits(trace: Trace, policy: str, *, on: Machine, budget_bytes: int) -> bool:
    """Tell whether a policy meets a budget."""
    try:
        return step_of(trace, policy, on=on, budget_bytes=budget_bytes).peak_bytes <= budget_bytes
    except (BudgetTooSmall, PlanError):
        return False


def largest(holds: Callable[[int], bool], *, low: int, high: int) -> int:
    """Return the largest whole number up to `high` for which something holds that holds for `low`, to about 3%."""
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def largest_batch(model: str, *, on: str, policy: str | None, capacity_bytes: int, guess: int) -> int:
    """Return the largest batch that a policy trains in a memory (None: unmanaged), by lines through two batches."""
    small, large = trace_of(model, guess, on), trace_of(model, 2 * guess, on)
    if policy is None:
        ends = small.peak_bytes, large.peak_bytes
    else:
        ends = (_least(small, policy, on), _least(large, policy, on))
    per_sample = (ends[1] - ends[0]) / guess
    return int((capacity_bytes - (ends[0] - per_sample * guess)) / per_sample)


def _least(trace: Trace, policy: str, on: str) -> int:
    """Return the smallest budget that a policy meets, to 1% of the peak."""
    there = machine(on)
    low, high = trace.floor_bytes(), trace.peak_bytes
    if fits(trace, policy, on=there, budget_bytes=low):
        return low
    while high - low > trace.peak_bytes // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(trace, policy, on=there, budget_bytes=middle) else (middle, high)
    return high


def average_bytes(step: Timeline) -> float:
    """Return the live bytes of a step, averaged over its time."""
    moments = [*step.memory, (step.step_s, 0)]
    held = sum(nbytes * (after - at) for (at, nbytes), (after, _) in pairwise(moments))
    return held / step.step_s


# ---- the headlines, one function each ----


def vdnn() -> Iterator[Headline]:
    """VGG-16 with batch 256 on a Titan X, and the memory of AlexNet."""
    there = machine("titan-x")
    vgg = trace_of("vgg16", 256, "titan-x")
    yield Headline(
        system="vDNN",
        setting="VGG-16, batch 256, Titan X 12 GB: loss against a GPU with enough memory",
        unit="loss",
        published=(0.18, 0.18),
        ours=loss(vgg, "vdnn", on=there, budget_bytes=12 * GIB),
        less_kind=loss(vgg, "vdnn", on=there, budget_bytes=12 * GIB, faster=FASTER),
        source="Rhu et al., MICRO 2016, abstract",
        why="the paper's 28 GB hold cuDNN's workspaces, which a trace of shapes does not have",
    )
    alexnet = trace_of("alexnet", 128, "titan-x")
    step = step_of(alexnet, "vdnn_all", on=there, budget_bytes=alexnet.peak_bytes)
    yield Headline(
        system="vDNN",
        setting="AlexNet, batch 128, all inputs offloaded: average memory beside weights and momentum",
        unit="saved",
        published=(0.89, 0.89),
        ours=1 - (average_bytes(step) - alexnet.static_bytes) / (alexnet.peak_bytes - alexnet.static_bytes),
        source="Rhu et al., MICRO 2016, abstract",
        why="the paper compares with a framework that allocates all layers' data and gradients for the whole step; our "
        "baseline frees dead tensors at once",
    )


def vdnn_pp() -> Iterator[Headline]:
    """The gain over vDNN."""
    there = machine("titan-x")
    gains: list[list[float]] = []
    for model, batch in (("vgg16", 256), ("alexnet", 512), ("resnet50", 256)):
        trace = trace_of(model, batch, "titan-x")
        budget_bytes = min(12 * GIB, max(_least(trace, "vdnn_all", "titan-x"), trace.peak_bytes // 2))
        gains.append(
            [
                step_of(trace, "vdnn", on=there, budget_bytes=budget_bytes, faster=faster).step_s
                / step_of(trace, "vdnn_pp", on=there, budget_bytes=budget_bytes, faster=faster).step_s
                - 1
                for faster in (1.0, FASTER)
            ]
        )
    yield Headline(
        system="vDNN++",
        setting="most of VGG-16, AlexNet and ResNet-50 on a Titan X: gain over vDNN",
        unit="saved",
        published=(0.60, 0.60),
        ours=max(one[0] for one in gains),
        less_kind=max(one[1] for one in gains),
        source="Shriram et al., IPDPS 2019, abstract: up to 60% relative improvement",
        why="a maximum over models and batches that the abstract does not name; vDNN itself loses less here",
    )


def modnn() -> Iterator[Headline]:
    """The loss on a GPU of 12 GB."""
    vgg, there = trace_of("vgg16", 256, "titan-x"), machine("titan-x")
    yield Headline(
        system="moDNN",
        setting="VGG-16, batch 256, Titan X 12 GB: loss",
        unit="loss",
        published=(0.08, 0.08),
        ours=loss(vgg, "modnn", on=there, budget_bytes=12 * GIB),
        less_kind=loss(vgg, "modnn", on=there, budget_bytes=12 * GIB, faster=FASTER),
        source="Chen et al., DATE 2018, abstract: 8% loss on a GPU of 12 GB",
        why="the model and the batch are vDNN's: the abstract names none",
    )


def superneurons() -> Iterator[Headline]:
    """How deep a ResNet can be in 12 GB."""
    depths = (101, 152)
    traces = [trace_of("resnet", 16, "k40c", sizes=(("depth", depth),)) for depth in depths]

    def deepest(nbytes: list[int]) -> float:
        per_layer = (nbytes[1] - nbytes[0]) / (depths[1] - depths[0])
        return depths[0] + (12 * GIB - nbytes[0]) / per_layer

    plain = deepest([trace.peak_bytes for trace in traces])
    managed = deepest([_least(trace, "superneurons", "k40c") for trace in traces])
    yield Headline(
        system="unmanaged",
        setting="deepest ResNet in 12 GB, batch 16 (SuperNeurons' baseline, TensorFlow: 592 layers)",
        unit="times",
        published=(1.0, 1.0),
        ours=plain / 592,
        source="Wang et al., PPoPP 2018",
        why="a line through two depths; the paper's 592 is TensorFlow's, with its allocator and workspaces",
    )
    yield Headline(
        system="SuperNeurons",
        setting="deepest ResNet in 12 GB, batch 16: times the unmanaged one",
        unit="times",
        published=(3.2432, 3.2432),
        ours=managed / plain,
        source="Wang et al., PPoPP 2018, by a survey: 3.2432 times as deep as TensorFlow's",
        why="a line through two depths; here only the bytes of the step count, without workspaces and fragmentation",
    )


def layrub() -> Iterator[Headline]:
    """Memory and time over several networks."""
    there = machine("k40c")
    saved, taken, less_kind = [], [], []
    for model, batch in (("alexnet", 256), ("vgg16", 64), ("resnet50", 64), ("inception_v3", 64)):
        trace = trace_of(model, batch, "k40c")
        step = step_of(trace, "layrub", on=there, budget_bytes=trace.peak_bytes)
        saved.append(1 - step.peak_bytes / trace.peak_bytes)
        taken.append(step.step_s / trace.duration_s - 1)
        quick = step_of(trace, "layrub", on=there, budget_bytes=trace.peak_bytes, faster=FASTER)
        less_kind.append(quick.step_s / (trace.duration_s / FASTER) - 1)
    yield Headline(
        system="Layrub",
        setting="AlexNet, VGG-16, ResNet-50, Inception-v3 on a K40c: memory, average",
        unit="saved",
        published=(0.582, 0.582),
        ours=sum(saved) / len(saved),
        source="Jin et al., ACM TACO 15(3), 2018, abstract: 58.2% on average against Caffe",
        why="Caffe holds data and gradients of all layers; our baseline frees dead tensors at once",
    )
    yield Headline(
        system="Layrub",
        setting="the same: more time",
        unit="saved",
        published=(0.241, 0.241),
        ours=sum(taken) / len(taken),
        less_kind=sum(less_kind) / len(less_kind),
        source="Jin et al., ACM TACO 15(3), 2018, abstract: 24.1% more time",
        why="its waits at both ends of a layer",
    )


def capuchin() -> Iterator[Headline]:
    """BERT's largest batch."""
    plain = largest_batch("bert_base", on="v100", policy=None, capacity_bytes=16 * GIB, guess=16)
    managed = largest_batch("bert_base", on="v100", policy="capuchin", capacity_bytes=16 * GIB, guess=16)
    yield Headline(
        system="Capuchin",
        setting="BERT-base in 16 GB: largest batch, times the unmanaged one",
        unit="times",
        published=(7.0, 7.0),
        ours=managed / plain,
        source="Peng et al., ASPLOS 2020, abstract: 7 times TensorFlow's",
        why="a line through two batches, at 512 tokens; any batch that fits counts, however slow",
    )


def meng() -> Iterator[Headline]:
    """Half the memory at equal batch."""
    trace, there = trace_of("resnet50", 128, "v100"), machine("v100")
    budget_bytes = int((1 - 0.5426) * (trace.peak_bytes - trace.static_bytes)) + trace.static_bytes
    yield Headline(
        system="Meng et al.",
        setting="ResNet-50, batch 128, 54% less memory for activations: more time",
        unit="saved",
        published=(0.0, 0.10),
        ours=step_of(trace, "meng", on=there, budget_bytes=budget_bytes).step_s / trace.duration_s - 1,
        less_kind=step_of(trace, "meng", on=there, budget_bytes=budget_bytes, faster=FASTER).step_s
        / (trace.duration_s / FASTER)
        - 1,
        source="Meng et al., NIPS ML Systems workshop 2017, by a survey: below 10%",
        why="the model is ours; an operator waits for each copy out, though the pass counts on 16 GB/s",
    )


def tflms() -> Iterator[Headline]:
    """ResNet-50 at 4.9 times the batch over NVLink."""
    there = machine("v100-nvlink")
    plain = largest_batch("resnet50", on="v100-nvlink", policy=None, capacity_bytes=16 * GIB, guess=64)
    trace = trace_of("resnet50", int(4.9 * plain), "v100-nvlink")
    yield Headline(
        system="TFLMS",
        setting=f"ResNet-50, 4.9 times the batch that fits ({plain}), V100 16 GB with NVLink: loss",
        unit="loss",
        published=(0.07, 0.07),
        ours=loss(trace, "tflms", on=there, budget_bytes=16 * GIB),
        less_kind=loss(trace, "tflms", on=there, budget_bytes=16 * GIB, faster=FASTER),
        source="Le et al., ISMM 2019, by a survey",
        why="its tuner knows no time: thresholds that fit by bytes may wait",
    )


def autoswap() -> Iterator[Headline]:
    """Memory without overhead, and SmartPool's layout."""
    there = machine("gtx1080")
    saved, smaller = [], []
    for model, batch in (("vgg16", 32), ("resnet50", 32), ("alexnet", 128)):
        trace = trace_of(model, batch, "gtx1080")
        problem = problem_of(trace, there, budget_bytes=trace.floor_bytes(), keep_times=True)
        plan = AutoSwap(mode="no_overhead").plan(problem)
        unhurried = replace(problem, budget_bytes=trace.peak_bytes)
        step = settle(unhurried, _Given(plan.swaps, "autoswap")).timeline
        saved.append(1 - step.peak_bytes / trace.peak_bytes)
        blocks = [block for block in blocks_of(trace) if block.nbytes]
        smaller.append(1 - colour(blocks).footprint_bytes / reserved_peak(stream_of(trace), "pytorch"))
    yield Headline(
        system="AutoSwap",
        setting="VGG-16, ResNet-50, AlexNet on a GTX 1080, no overhead allowed: memory, average",
        unit="saved",
        published=(0.342, 0.342),
        ours=sum(saved) / len(saved),
        source="Zhang et al., arXiv 1903.06631, abstract",
        why="weights, gradients and momentum count and stay",
    )
    yield Headline(
        system="SmartPool",
        setting="the same: memory of its layout against a caching pool",
        unit="saved",
        published=(0.133, 0.133),
        ours=sum(smaller) / len(smaller),
        source="Zhang et al., arXiv 1903.06631, abstract: 13.3% less than cnmem",
        why="our pool is a model of PyTorch's allocator; cnmem's rules are not known here",
    )


@dataclass(frozen=True)
class _Given:
    """A policy whose swaps are decided already."""

    swaps: tuple[Any, ...]
    base: str

    @property
    def name(self) -> str:
        return self.base

    @property
    def summary(self) -> str:
        return "decided before"

    @property
    def about(self) -> Any:
        return registry.policy(self.base).about

    def plan(self, problem: Any) -> Any:
        from lowtide.plan.compose import compose

        return compose(self.base, problem, self.swaps)


def flashneuron() -> Iterator[Headline]:
    """The largest batch over a drive."""
    ratios = []
    for model, guess in (("bert_base", 16), ("resnet50", 64)):
        plain = largest_batch(model, on="v100", policy=None, capacity_bytes=16 * GIB, guess=guess)
        ratios.append(
            largest_batch(model, on="v100", policy="flashneuron", capacity_bytes=16 * GIB, guess=guess) / plain
        )
    yield Headline(
        system="FlashNeuron",
        setting="BERT-base and ResNet-50 in 16 GB: largest batch, times the unmanaged one, average",
        unit="times",
        published=(12.4, 14.0),
        ours=sum(ratios) / len(ratios),
        source="Bae et al., FAST 2021, by a survey",
        why="only what crosses from forward to backward leaves; scratch and short-lived values grow with the batch and "
        "stay. The paper also stores in half precision",
    )


def pooch() -> Iterator[Headline]:
    """ResNet-50 at 50 GB in 16 GB, over PCIe and over NVLink."""
    batch = 640
    for on, published, what in (("v100", 0.38, "PCIe 3.0"), ("v100-nvlink", 0.28, "NVLink 2.0")):
        trace = trace_of("resnet50", batch, on)
        yield Headline(
            system="PoocH",
            setting=f"ResNet-50, batch {batch}, {trace.peak_bytes / GIB:.0f} GB in 16 GB, V100 with {what}: loss",
            unit="loss",
            published=(published, published),
            ours=loss(trace, "pooch", on=machine(on), budget_bytes=16 * GIB),
            less_kind=loss(trace, "pooch", on=machine(on), budget_bytes=16 * GIB, faster=FASTER),
            source="Ito et al., arXiv 1907.05013, abstract: 38% on x86, 28% on POWER9, a network of 50 GB",
            why="the last table below varies our costs one by one",
        )


def pooch_by_costs() -> str:
    """Return what PoocH's loss would be with other costs, as a table: which of them could be too kind?"""
    there = machine("v100")
    link = there.links["spill"]
    slower = replace(link, write_bytes_per_s=link.write_bytes_per_s / 2, read_bytes_per_s=link.read_bytes_per_s / 2)
    trace = trace_of("resnet50", 640, "v100")
    swap_only = replace(problem_of(trace, there, budget_bytes=16 * GIB, keep_times=True), can_recompute=False)
    rows = [
        ("as in the table above", loss(trace, "pooch", on=there, budget_bytes=16 * GIB)),
        ("operators 1.5 times as fast", loss(trace, "pooch", on=there, budget_bytes=16 * GIB, faster=1.5)),
        ("operators twice as fast", loss(trace, "pooch", on=there, budget_bytes=16 * GIB, faster=2.0)),
        ("one direction of the link at a time", _linked(trace, there, replace(link, duplex=False))),
        ("a link of half the rate", _linked(trace, there, slower)),
        ("nothing made again", 1 - trace.duration_s / settle(swap_only, registry.policy("pooch")).timeline.step_s),
        ("operators 1.5 times as fast, one direction", _linked(trace, there, replace(link, duplex=False), faster=1.5)),
        ("our second search left out", loss(trace, Pooch(start="published"), on=there, budget_bytes=16 * GIB)),
    ]
    return table(
        ("PoocH, ResNet-50, batch 640, V100 16 GB, PCIe 3.0", "loss"), ((what, f"{lost:.0%}") for what, lost in rows)
    )


def _linked(trace: Trace, there: Machine, link: Link, *, faster: float = 1.0) -> float:
    return loss(trace, "pooch", on=replace(there, links={"spill": link}), budget_bytes=16 * GIB, faster=faster)


def nnabla() -> Iterator[Headline]:
    """ResNet-50 with batch 1440."""
    trace, there = trace_of("resnet50", 1440, "v100", dtype="float16"), machine("v100")
    yield Headline(
        system="nnabla",
        setting="ResNet-50, batch 1440 in half precision, V100 16 GB: loss",
        unit="loss",
        published=(0.45, 0.45),
        ours=loss(trace, "nnabla", on=there, budget_bytes=16 * GIB),
        less_kind=loss(trace, "nnabla", on=there, budget_bytes=16 * GIB, faster=FASTER),
        source="arXiv 2010.14109: 55% of the speed at 7.5 times the memory",
        why="the preset's operators have no tensor cores, with which they would be several times as fast",
    )


def swapadvisor() -> Iterator[Headline]:
    """Up to twelve times the memory."""
    there = machine("v100")
    ours, less_kind = [], []
    for times in (2, 4):
        batch = int(times * 16 * GIB / (trace_of("resnet50", 64, "v100").peak_bytes / 64))
        trace = trace_of("resnet50", batch, "v100")
        ours.append(loss(trace, "swapadvisor", on=there, budget_bytes=16 * GIB))
        less_kind.append(loss(trace, "swapadvisor", on=there, budget_bytes=16 * GIB, faster=FASTER))
    yield Headline(
        system="SwapAdvisor",
        setting="ResNet-50 at 2 and 4 times the memory of a V100 16 GB: loss, average",
        unit="loss",
        published=(0.01, 0.47),
        ours=sum(ours) / len(ours),
        less_kind=sum(less_kind) / len(less_kind),
        source="Huang et al., ASPLOS 2020, abstract: 53% to 99% of the throughput with endless memory",
        why="another model; genes are not the paper's, for the order of operators stays",
    )


def recomputation() -> Iterator[Headline]:
    """Gruslys' dynamic programme, Echo's and Kusumoto's memory."""
    steps, slots = 1000, 50
    yield Headline(
        system="Gruslys et al.",
        setting=f"sequence of {steps}, {slots} slots (95% less memory): more time, backward as long as forward",
        unit="saved",
        published=(0.33, 0.33),
        ours=(cost(steps, slots) + steps) / (2 * steps - 1 + steps) - 1,
        source="Gruslys et al., NIPS 2016",
        why="the recurrence itself: no machine in it",
    )
    trace = trace_of("seq2seq", 64, "v100")
    yield Headline(
        system="Echo",
        setting="sequence to sequence, batch 64: footprint, times smaller",
        unit="times",
        published=(1.89, 3.13),
        ours=trace.peak_bytes / _least(trace, "echo", "v100"),
        source="Zheng et al., ISCA 2020, abstract: 1.89 times on average, 3.13 at most",
        why="most of our model's memory are scores over 32,000 words, which a matrix product makes: never discarded",
    )
    saved = []
    for model, batch in (("resnet50", 64), ("unet", 8)):
        one = trace_of(model, batch, "v100")
        saved.append(1 - _least(one, "kusumoto", "v100") / one.peak_bytes)
    yield Headline(
        system="Kusumoto et al.",
        setting="ResNet-50 and U-Net: peak, average",
        unit="saved",
        published=(0.36, 0.81),
        ours=sum(saved) / len(saved),
        source="Kusumoto et al., NeurIPS 2019",
        why="weights and momentum count and stay",
    )


def dymem() -> Iterator[Headline]:
    """Memory against vDNN."""
    saved = []
    for model in ("resnet50", "inception_v3", "densenet121"):
        trace = trace_of(model, 64, "v100")
        peaks = [_least(trace, policy, "v100") for policy in ("dymem", "vdnn_all")]
        saved.append(1 - peaks[0] / peaks[1])
    yield Headline(
        system="Dymem",
        setting="ResNet-50, Inception-v3, DenseNet-121: smallest memory against vDNN's, average",
        unit="saved",
        published=(0.31, 0.31),
        ours=sum(saved) / len(saved),
        source="Yang & Cheng, HPDC 2020, by a survey",
        why="only two rules of the system are known",
    )


def unified_memory() -> Iterator[Headline]:
    """Explicit copies against paging."""
    trace = trace_of("resnet50", 256, "v100")
    problem = problem_of(trace, machine("v100"), budget_bytes=12 * GIB, keep_times=True)
    implicit, explicit = paging(problem), paging(problem, explicit=range(len(trace.storages)))
    yield Headline(
        system="Li & Chapman",
        setting="ResNet-50, batch 256 in 12 GB: page model, paging over explicit copies",
        unit="times",
        published=(7.6, 18.7),
        ours=implicit.step_s / explicit.step_s,
        source="Li & Chapman, SC 2019, by a survey: 7.6 times on average, 18.7 at most, over unified memory",
        why="the paper's programs are HPC benchmarks that compute far less per byte",
    )


def slow_memory() -> Iterator[Headline]:
    """Sentinel, first touch and TierTrain where slow memory is read in place."""
    there = machine("dram-optane")
    trace = trace_of("resnet50", 64, "dram-optane", touched=True)
    fast = trace.floor_bytes() // 8
    for system, policy, share, published, source, why in (
        (
            "Sentinel",
            "sentinel",
            0.2,
            (0.0, 0.08),
            "Ren et al., arXiv 1909.05182: at most 8%",
            "rules from memory of the paper",
        ),
        (
            "first touch (AutoTM's baseline)",
            "first_touch",
            0.35,
            (0.418, 0.418),
            "Hildebrand et al., ASPLOS 2020: 71.9% more time",
            "another model, and a roofline instead of kernels",
        ),
    ):
        budget_bytes = max(int(share * trace.peak_bytes), fast)
        yield Headline(
            system=system,
            setting=f"ResNet-50, batch 64, DRAM of {share:.0%} of the peak above Optane: loss",
            unit="loss",
            published=published,
            ours=loss(trace, policy, on=there, budget_bytes=budget_bytes),
            source=source,
            why=why,
        )
    cxl = machine("cxl")
    gpt = trace_of("resnet50", 64, "cxl", touched=True)
    yield Headline(
        system="TierTrain",
        setting="ResNet-50, batch 64, fast memory of 41% of the peak above CXL: loss",
        unit="loss",
        published=(0.0, 0.16),
        ours=loss(gpt, "tiertrain", on=cxl, budget_bytes=int(0.41 * gpt.peak_bytes)),
        source="Intel, ISMM 2025, abstract: within 16%",
        why="a reconstruction: only the abstract is known",
    )


HEADLINES: dict[str, Callable[[], Iterator[Headline]]] = {
    one.__name__: one
    for one in (
        vdnn,
        modnn,
        pooch,
        tflms,
        nnabla,
        swapadvisor,
        layrub,
        vdnn_pp,
        capuchin,
        flashneuron,
        superneurons,
        meng,
        autoswap,
        recomputation,
        dymem,
        unified_memory,
        slow_memory,
    )
}
LEFT_OUT = (
    ("AccUDNN", "4.2 times Caffe's efficient batch: the memory of its baseline is not known"),
    (
        "Checkmate, Chen et al.",
        "inputs 5.1 times as large; 48 GB to 7 GB at 1,000 layers: captures of that size take longer than all others",
    ),
    (
        "AutoTM, HALO, DeepTM, Tahoe, Soft2LM, Cori",
        "[slow memory](benchmarks-slow-memory.md) has their figures, simulated and measured",
    ),
    ("MindSpore, the survey's algorithms, DTR, unified memory", "publish no figure of this kind"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the headlines; write figures, page and chart."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    found: list[Headline] = []
    refused: list[tuple[str, str]] = []
    for name in options.only or options.again or HEADLINES:
        begun = time.perf_counter()
        try:
            for one in HEADLINES[name]():
                found.append(one)
                ours = f"{shown(one.ours, one.unit)} here"
                harder = "" if one.less_kind is None else f", {shown(one.less_kind, one.unit)} less kind"
                console.print(f"{one.system}: {one.setting}: {_range(one)} published, {ours}{harder}", soft_wrap=True)
        except (BudgetTooSmall, PlanError) as error:
            refused.append((name, str(error)))
            console.print(f"{name}: {error}", style="bold red", soft_wrap=True)
        console.print(f"  {name} took {time.perf_counter() - begun:.0f} s", style="dim")
    if options.only:
        return 0
    if options.again:
        new = {one.system for one in found}
        found += [one for one in _read(options.out) if one.system not in new]
    options.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    draw(found, options.chart)
    write_page(markdown(found, refused) + "\n" + pooch_by_costs(), options.page, script="papers.py")
    return 0


def _read(path: Path) -> list[Headline]:
    """Return the headlines of an earlier run."""
    lines = json.loads(path.read_text())
    return [Headline(**{**line, "published": tuple(line["published"])}) for line in lines]


def _range(one: Headline) -> str:
    low, high = one.published
    return shown(low, one.unit) if low == high else f"{shown(low, one.unit)} to {shown(high, one.unit)}"


def _difference(one: Headline) -> str:
    low, high = one.published
    nearest = min(max(one.ours, low), high)
    if nearest == one.ours and low < high:
        return "within"
    if one.unit == "times":
        return f"{one.ours / nearest - 1:+.0%}"
    return f"{100 * (one.ours - nearest):+.0f} points"


def markdown(found: list[Headline], refused: Sequence[tuple[str, str]] = ()) -> str:
    """Return the headlines as a table."""
    headings = ("system", "what", "published", "ours", "difference", "ours, less kind", "why", "source")
    rows = [
        (
            one.system,
            one.setting,
            _range(one),
            shown(one.ours, one.unit),
            _difference(one),
            "" if one.less_kind is None else shown(one.less_kind, one.unit),
            one.why,
            one.source,
        )
        for one in found
    ]
    left_out = "".join(f"- {system}: {why}.\n" for system, why in (*LEFT_OUT, *refused))
    return f"{table(headings, rows, texts=8)}\nLeft out:\n\n{left_out}"


def draw(found: list[Headline], path: Path) -> None:
    """Draw published against ours: a range as a bar, a figure as a line across it, ours as a dot."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shares = [one for one in found if one.unit != "times"]
    times = [one for one in found if one.unit == "times" and one.system != "unmanaged"]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 0.34 * max(len(shares), len(times)) + 1.4), width_ratios=(3, 2), layout="constrained"
    )
    for axes, ones, scale in ((left, shares, 100.0), (right, times, 1.0)):
        for place, one in enumerate(reversed(ones)):
            low, high = (scale * value for value in one.published)
            axes.barh(place, max(high - low, 0.0), left=low, height=0.5, color="#b9c9d6")
            axes.plot([low, low], [place - 0.3, place + 0.3], color="#4a6378", linewidth=2)
            axes.plot([high, high], [place - 0.3, place + 0.3], color="#4a6378", linewidth=2)
            axes.plot(scale * one.ours, place, "o", color="#d1495b")
            if one.less_kind is not None:
                axes.plot(scale * one.less_kind, place, "o", markerfacecolor="none", color="#d1495b")
        axes.set_yticks(range(len(ones)), [_label(one) for one in reversed(ones)], fontsize=8)
        axes.grid(axis="x", alpha=0.3)
    left.set_xlabel("percent: throughput lost, time added or memory saved")
    right.set_xscale("log")
    right.set_xlabel("times")
    right.set_xlim(1, 1.2 * max((max(one.ours, *one.published) for one in times), default=10))
    left.set_xlim(0, 100)
    figure.suptitle(
        "What papers state (lines, bars) and what the simulator finds (dots; hollow: operators 1.5x as fast)"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _label(one: Headline) -> str:
    what = one.setting.split(": ")[-1].split(",")[0]
    return f"{one.system}: {what}" if len(what) < 34 else f"{one.system}: {what[:32]}..."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=tuple(HEADLINES), help="print some headlines and write nothing")
    parser.add_argument("--again", nargs="+", choices=tuple(HEADLINES), help="run these, and keep the other results")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "papers.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reproduction.md")
    parser.add_argument("--chart", type=Path, default=ROOT / "docs" / "reproduction.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
