"""Networks to hold the policies of the literature against, and what their plans need."""

from __future__ import annotations

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Prediction, Problem
from lowtide.core.trace import Trace
from lowtide.plan.policy import Policy
from lowtide.testing.networks import INPUT, MIB, Layer, network_trace
from lowtide.testing.traces import machine_of

ROOMY = 1 << 50
FAST = Link(write_bytes_per_s=1e12, read_bytes_per_s=1e12, duplex=True)
DISK = Link(write_bytes_per_s=2e9, read_bytes_per_s=3e9, write_latency_s=1e-4, read_latency_s=1e-4)
BOUND = Link(write_bytes_per_s=2e8, read_bytes_per_s=2e8, duplex=True)


def problem_of(trace: Trace, budget_bytes: int, link: Link = DISK, *, can_recompute: bool = False) -> Problem:
    return Problem(trace=trace, machine=machine_of(link), budget_bytes=budget_bytes, can_recompute=can_recompute)


def predicted(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


def least_bytes(policy: Policy, trace: Trace) -> int:
    """Return the smallest budget for what a static policy moves: everything absent all through its gap."""
    plan = policy.plan(problem_of(trace, ROOMY))
    need = [op.peak_bytes for op in trace.ops]
    for swap in plan.swaps:
        for op in range(swap.gap.after_op, swap.gap.before_op):
            need[op] -= trace.storages[swap.gap.storage].nbytes
    return max(need, default=trace.static_bytes)


def within_step_bytes(trace: Trace) -> int:
    """Return what is needed with every gap empty that ends within the step: it decides about no others."""
    need = [op.peak_bytes for op in trace.ops]
    for gap in trace.gaps():
        if gap.before_op <= len(need):
            for op in range(gap.after_op, gap.before_op):
                need[op] -= trace.storages[gap.storage].nbytes
    return max(need, default=trace.static_bytes)


def chain(*kinds: str, nbytes: int = MIB, duration_s: float = 1e-3) -> list[Layer]:
    return [
        Layer(kind=kind, inputs=(position - 1,), nbytes=nbytes, duration_s=duration_s, param_bytes=_param_bytes(kind))
        for position, kind in enumerate(kinds)
    ]


def _param_bytes(kind: str) -> int:
    return 4096 if kind in ("conv", "linear", "norm", "layer_norm") else 0


class _Net:
    """A network being written down; every layer returns its own position."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def __call__(self, kind: str, *inputs: int, nbytes: int = MIB, duration_s: float = 1e-3) -> int:
        self.layers.append(
            Layer(kind=kind, inputs=inputs, nbytes=nbytes, duration_s=duration_s, param_bytes=_param_bytes(kind))
        )
        return len(self.layers) - 1

    def conv(self, source: int, *, nbytes: int = MIB, duration_s: float = 1e-3) -> int:
        made = self("conv", source, nbytes=nbytes, duration_s=duration_s)
        return self("relu_", made, nbytes=nbytes, duration_s=duration_s / 10)


def vgg() -> Trace:
    net, x = _Net(), INPUT
    for stage, convs in enumerate((2, 2, 3, 3)):
        for _ in range(convs):
            x = net.conv(x, nbytes=(8 - stage) * MIB)
        x = net("pool", x, nbytes=(7 - stage) * MIB // 2, duration_s=2e-4)
    for _ in range(2):
        x = net("linear", x, nbytes=MIB // 8, duration_s=5e-4)
    net("softmax", x, nbytes=MIB // 64, duration_s=1e-4)
    return network_trace(net.layers, input_bytes=MIB, model="vgg")


def resnet(blocks: int = 6) -> Trace:
    net = _Net()
    x = net.conv(INPUT)
    for _ in range(blocks):
        branch = net("relu_", net("norm", net("conv", x), duration_s=2e-4), duration_s=1e-4)
        branch = net("norm", net("conv", branch), duration_s=2e-4)
        x = net("relu_", net("add", branch, x, duration_s=1e-4), duration_s=1e-4)
    x = net("linear", x, nbytes=MIB // 8)
    net("softmax", x, nbytes=MIB // 64, duration_s=1e-4)
    return network_trace(net.layers, model="resnet")


def inception(modules: int = 4) -> Trace:
    net = _Net()
    x = net.conv(INPUT)
    for _ in range(modules):
        arms = [net.conv(x, nbytes=MIB // 4) for _ in range(3)]
        arms[1] = net.conv(arms[1], nbytes=MIB // 4)
        arms.append(net("pool", x, nbytes=MIB // 4, duration_s=2e-4))
        x = net("cat", *arms, duration_s=1e-4)
    x = net("linear", x, nbytes=MIB // 8)
    net("softmax", x, nbytes=MIB // 64, duration_s=1e-4)
    return network_trace(net.layers, model="inception")


def densenet(layers: int = 6) -> Trace:
    net = _Net()
    grown = [net.conv(INPUT)]
    for depth in range(layers):
        joined = net("cat", *grown, nbytes=(depth + 1) * MIB, duration_s=1e-4) if len(grown) > 1 else grown[0]
        normed = net("norm", joined, nbytes=(depth + 1) * MIB, duration_s=2e-4)
        grown.append(net.conv(normed))
    x = net("linear", grown[-1], nbytes=MIB // 8)
    net("softmax", x, nbytes=MIB // 64, duration_s=1e-4)
    return network_trace(net.layers, model="densenet")
