"""A trace seen as layers, from made-up networks and from a recorded one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lowtide.core.trace import Op, Phase, Trace
from lowtide.plan.views.layers import LayerKind, crossing_gaps, kind_of, layers_of, relu_results, step_at
from lowtide.testing.networks import INPUT, Layer, network_trace, networks
from lowtide.testing.traces import chain_trace, make_trace, skip_trace, traces


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::convolution", LayerKind.CONV),
        ("aten::mkldnn_convolution", LayerKind.CONV),
        ("aten::_slow_conv2d_forward", LayerKind.CONV),
        ("aten::addmm", LayerKind.LINEAR),
        ("aten::mm", LayerKind.LINEAR),
        ("aten::bmm", LayerKind.LINEAR),
        ("aten::native_batch_norm", LayerKind.NORM),
        ("aten::native_layer_norm", LayerKind.NORM),
        ("aten::relu_", LayerKind.ACTIVATION),
        ("aten::gelu", LayerKind.ACTIVATION),
        ("aten::max_pool2d_with_indices", LayerKind.POOL),
        ("aten::_adaptive_avg_pool2d", LayerKind.POOL),
        ("aten::add", LayerKind.JOIN),
        ("aten::add_.Tensor", LayerKind.JOIN),
        ("aten::cat", LayerKind.CONCAT),
        ("aten::embedding", LayerKind.EMBEDDING),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", LayerKind.ATTENTION),
        ("aten::_log_softmax", LayerKind.LOSS),
        ("aten::nll_loss_forward", LayerKind.LOSS),
        ("aten::mul", LayerKind.OTHER),
        ("aten::sum", LayerKind.OTHER),
        ("layer3", LayerKind.OTHER),
    ],
)
def test_an_operators_name_tells_what_it_computes(name: str, kind: LayerKind) -> None:
    assert kind_of(Op(name=name, phase=Phase.FORWARD, start_s=0.0, duration_s=0.0, peak_bytes=0)) is kind


def net() -> Trace:
    """conv - relu (in place) - conv - add (with the first) - pool - linear."""
    return network_trace(
        [
            Layer(kind="conv", inputs=(INPUT,), param_bytes=4),
            Layer(kind="relu_", inputs=(0,)),
            Layer(kind="conv", inputs=(1,), param_bytes=4),
            Layer(kind="add", inputs=(2, 1)),
            Layer(kind="pool", inputs=(3,)),
            Layer(kind="linear", inputs=(4,), param_bytes=4),
        ]
    )


def test_the_layers_of_a_small_network() -> None:
    trace = net()
    found = layers_of(trace)
    assert [(layer.kind, layer.forward) for layer in found] == [
        (LayerKind.CONV, range(1)),
        (LayerKind.ACTIVATION, range(1, 2)),
        (LayerKind.CONV, range(2, 4)),  # the join saves nothing and belongs to the layer before it
        (LayerKind.POOL, range(4, 5)),
        (LayerKind.LINEAR, range(5, 6)),
    ]
    names = [[trace.ops[op].name for op in layer.backward] for layer in found]
    assert names == [
        ["aten::convolution_backward"],
        ["aten::threshold_backward"],
        ["aten::convolution_backward"],
        ["aten::max_pool2d_with_indices_backward"],
        ["aten::mm"],
    ]
    # The activation's result is saved by itself and by the convolution, and unpacked for each of them.
    activation, conv = found[1], found[2]
    assert activation.saves == conv.saves == activation.inputs
    assert activation.saves[0] in conv.inputs
    assert [layer.index for layer in found] == list(range(5))
    assert conv.forward_s == pytest.approx(2e-3)
    assert conv.backward_s == pytest.approx(2e-3)


@pytest.mark.parametrize("trace", [chain_trace(5), skip_trace(4)], ids=lambda trace: trace.model)
def test_every_operator_of_a_chain_is_a_layer(trace: Trace) -> None:
    found = layers_of(trace)
    count = len(trace.ops) // 2
    assert [layer.forward for layer in found] == [range(k, k + 1) for k in range(count)]
    assert [layer.backward.start for layer in found] == [2 * count - 1 - k for k in range(count)]


def test_an_empty_trace_has_no_layers() -> None:
    assert layers_of(make_trace((), (), ())) == ()
    assert crossing_gaps(make_trace((), (), ())) == {}


@given(trace=networks() | traces())
@settings(max_examples=150, deadline=None)
def test_layers_are_in_order_and_their_backward_comes_later(trace: Trace) -> None:
    found = layers_of(trace)
    covered = [op for layer in found for op in layer.forward]
    assert covered == sorted(set(covered))
    for layer in found:
        assert all(trace.ops[op].phase is Phase.FORWARD for op in layer.forward)
        assert not layer.backward or layer.backward.start >= layer.forward.stop
    before_backward = next((k for k, op in enumerate(trace.ops) if op.phase is not Phase.FORWARD), len(trace.ops))
    assert set(range(before_backward)) <= set(covered)


@given(trace=networks() | traces())
@settings(max_examples=100, deadline=None)
def test_a_storage_waits_for_the_backward_pass_in_one_gap_at_most(trace: Trace) -> None:
    gaps = crossing_gaps(trace)
    assert set(gaps.values()) <= set(trace.gaps())
    for storage, gap in gaps.items():
        assert gap.storage == storage
        assert gap.before_op == len(trace.ops) or any(
            op.phase is Phase.BACKWARD for op in trace.ops[: gap.before_op + 1]
        )


def test_the_step_at_an_operator() -> None:
    assert [step_at((2, 5, 9), op) for op in (1, 2, 4, 5, 8, 9, 20)] == [-1, 0, 0, 1, 1, 2, 2]


def test_a_recorded_network_has_the_layers_of_its_modules() -> None:
    torch = pytest.importorskip("torch")
    from lowtide.capture import capture_step

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(8, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 16 * 16, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, labels = torch.randn(8, 3, 32, 32), torch.randint(4, (8,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()

    try:
        trace = capture_step(step, model=model, optimizer=optimizer)
    finally:
        torch.set_num_threads(threads)
    found = [layer for layer in layers_of(trace) if layer.kind is not LayerKind.LOSS]
    assert [layer.kind for layer in found] == [
        LayerKind.CONV,
        LayerKind.NORM,
        LayerKind.ACTIVATION,
        LayerKind.CONV,
        LayerKind.ACTIVATION,
        LayerKind.POOL,
        LayerKind.LINEAR,
    ]
    for layer in found:
        assert layer.backward, f"{layer.name} has a backward operator"
        assert trace.ops[layer.backward.start].phase is Phase.BACKWARD
    assert [layer.backward.start for layer in found] == sorted((layer.backward.start for layer in found), reverse=True)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("aten::relu", True),
        ("aten::relu_", True),
        ("aten::relu_.default", True),
        ("aten::leaky_relu", False),
        ("aten::prelu", False),
        ("aten::gelu", False),
        ("aten::convolution", False),
    ],
)
def test_only_what_a_relu_writes_has_zeros(name: str, found: bool) -> None:
    trace = chain_trace(3)
    first, *others = trace.ops
    trace = replace(trace, ops=(replace(first, name=name), *(replace(op, name="aten::relu") for op in others)))
    backward = {storage for op in others if op.phase is not Phase.FORWARD for storage in op.writes}
    assert (set(first.writes) <= relu_results(trace)) == found
    assert not relu_results(trace) & backward
