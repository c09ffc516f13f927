"""Operators, copies and the device's module: what code written for accelerators does, and gets."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowtide.emulator import Emulator
from tests.emulator.devices import DEVICES

A = torch.arange(24, dtype=torch.float32).reshape(4, 6) - 7
INDEX = torch.tensor([3, 0, 2])

EXPRESSIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "nonzero": lambda a, _: a.nonzero(),
    "masked_select": lambda a, _: a[a > 3],
    "unique": lambda a, _: (a % 5).unique(),
    "sort": lambda a, _: a.sort(dim=1, descending=True)[0],
    "topk": lambda a, _: a.topk(2),
    "index": lambda a, i: a[i],
    "index_put": lambda a, i: a.clone().index_put_((i,), torch.ones(6, device=a.device)),
    "gather": lambda a, i: a.gather(0, i.unsqueeze(1)),
    "unfold": lambda a, _: a.unfold(1, 3, 2),
    "cat": lambda a, _: torch.cat([a, a[:2] * 2]),
    "einsum": lambda a, _: torch.einsum("ij,kj->ik", a, a),
    "linalg": lambda a, _: torch.linalg.svdvals(a),
    "complex": lambda a, _: torch.view_as_real(torch.complex(a, a * 2).conj().resolve_conj()),
    "fft": lambda a, _: torch.view_as_real(torch.fft.fft(a)),
    "interpolate": lambda a, _: functional.interpolate(a[None, None], scale_factor=1.5, mode="bilinear"),
    "cumsum": lambda a, _: a.cumsum(1),
    "where": lambda a, _: torch.where(a > 0, a, -a),
    "item": lambda a, _: a.sum().item(),
    "tolist": lambda a, _: a.tolist(),
    "bool": lambda a, _: bool((a > 100).any()),
    "to half": lambda a, _: a.half(),
    "embedding": lambda a, i: functional.embedding(i, a),
    "loss": lambda a, _: functional.mse_loss(a, a * 2),
    "in place": lambda a, _: a.clone().mul_(2).clamp_(max=5),
    "out that grows": lambda a, _: torch.mul(a, 2, out=torch.empty(0, device=a.device)),
}


def in_host_memory(value: object) -> list[object]:
    if isinstance(value, Tensor):
        return [value.stride(), value.cpu()]
    if isinstance(value, tuple | list):
        return [each for item in value for each in in_host_memory(item)]
    return [value]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_operator_gives_what_the_cpu_gives(sim: Emulator, name: str) -> None:
    expected = in_host_memory(EXPRESSIONS[name](A.clone(), INDEX))
    for _ in range(3):
        got = in_host_memory(EXPRESSIONS[name](A.to("sim"), INDEX.to("sim")))
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
            else:
                assert a == b


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t(),
    "every second": lambda t: t[:, ::2],
    "expanded": lambda t: t[:1].expand(4, 6),
    "one row": lambda t: t[1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.complex64])
def test_copies_convert_and_rearrange(sim: Emulator, layout: str, dtype: torch.dtype) -> None:
    view = LAYOUTS[layout]
    there = view(A.to("sim"))
    assert torch.equal(there.cpu(), view(A))
    assert torch.equal(there.to(dtype).cpu(), view(A).to(dtype))
    assert torch.equal(view(A).to("sim", dtype=dtype).cpu(), view(A).to(dtype))
    target = view(torch.zeros(4, 6, dtype=dtype).to("sim")) if layout != "expanded" else torch.zeros(4, 6).to("sim")
    target.copy_(view(A))
    assert torch.equal(target.cpu(), view(A).to(target.dtype))


def test_conjugate_views_are_copied_as_what_they_mean(sim: Emulator) -> None:
    z = torch.complex(A, A + 1)
    there = z.to("sim")
    assert torch.equal(there.conj().cpu(), z.conj().resolve_conj())
    assert torch.equal(z.conj().to("sim").cpu(), z.conj().resolve_conj())
    target = torch.zeros_like(there)
    target.copy_(there.conj())
    assert torch.equal(target.cpu(), z.conj().resolve_conj())


def test_indices_may_be_on_the_host_but_what_is_indexed_may_not(sim: Emulator) -> None:
    assert torch.equal(A.to("sim")[INDEX].cpu(), A[INDEX])
    with pytest.raises(RuntimeError, match="two devices"):
        A[INDEX.to("sim")]
    with pytest.raises(RuntimeError, match="two devices"):
        A.to("sim").index_select(0, INDEX)


def test_operands_of_two_devices_are_refused_unless_strictness_is_off(sim: Emulator) -> None:
    x, weight = A.to("sim"), torch.ones(6)
    with pytest.raises(RuntimeError, match="two devices, sim:0 and cpu"):
        x + A
    with pytest.raises(RuntimeError, match=r"two devices, sim:0 and cpu! \(in aten::native_layer_norm\)"):
        functional.layer_norm(x, (6,), weight)
    assert torch.equal((x + torch.tensor(2.0)).cpu(), A + 2)  # a scalar is a number
    sim.configure(strict=False)
    assert torch.equal(functional.layer_norm(x, (6,), weight).cpu(), functional.layer_norm(A, (6,), weight))


def test_what_a_queued_kernel_raises_surfaces_at_the_next_synchronisation(sim: Emulator) -> None:
    table, good, bad = torch.zeros(4, 2).to("sim"), torch.tensor([1]).to("sim"), torch.tensor([9]).to("sim")
    functional.embedding(good, table)
    functional.embedding(good, table)
    functional.embedding(bad, table)
    with pytest.raises(RuntimeError, match=r"a kernel failed after its launch.*index out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()  # once
    assert functional.embedding(good, table).sum().item() == 0


def test_a_kernel_written_in_python_runs_without_a_deadlock(sim: Emulator) -> None:
    @torch.library.custom_op("lowtide_tests::twice", mutates_args=(), device_types="cpu")
    def twice(x: Tensor) -> Tensor:
        return x * 2

    x = A.to("sim")
    for _ in range(3):
        assert torch.equal(twice(x).cpu(), A * 2)
        twice(x)
        torch.accelerator.synchronize()


def test_tensors_are_printed_pickled_and_copied(sim: Emulator) -> None:
    x = A.to("sim").requires_grad_()
    assert "device='sim:0'" in repr(x)
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer).cpu(), A)
    buffer.seek(0)
    assert torch.load(buffer, map_location="cpu").device.type == "cpu"
    assert torch.equal(copy.deepcopy(x).detach().cpu(), A)


def test_torch_accelerator_knows_the_device(sim: Emulator) -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == DEVICES
    assert torch.accelerator.current_device_index() == 0
    assert torch.tensor([1.0], device="sim").device == torch.device("sim", 0)
    with pytest.raises(RuntimeError, match="no device sim:5"):
        torch.zeros(1, device="sim:5")


def test_the_devices_module_has_what_device_agnostic_code_asks_for(sim: Emulator) -> None:
    module = torch.get_device_module("sim")
    assert module is torch.sim  # type: ignore[attr-defined]
    before = torch.accelerator.current_stream()
    with module.stream(module.Stream()) as side:
        assert module.current_stream() == side != before
    assert module.current_stream() == before == module.default_stream()
    event = module.Event(enable_timing=True)
    event.record()
    event.synchronize()
    assert module.max_memory_allocated() >= module.memory_allocated()
    with module.device(0):
        assert module.current_device() == 0


def test_random_states_are_kept_and_set(sim: Emulator) -> None:
    module = torch.get_device_module("sim")
    torch.manual_seed(4)
    state = module.get_rng_state()
    first = torch.rand(5, device="sim")
    module.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="sim"), first)
    generator = torch.Generator("sim").manual_seed(9)
    same = torch.Generator().manual_seed(9)
    assert torch.equal(torch.rand(5, device="sim", generator=generator).cpu(), torch.rand(5, generator=same))
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.rand(3, device="sim")
    torch.manual_seed(4)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(5, device="sim"), first)


def test_modules_move_there_and_back(sim: Emulator) -> None:
    layer = torch.nn.Linear(6, 3)
    weight = layer.weight.detach().clone()
    layer.to("sim")
    assert layer.weight.device.type == "sim"
    layer.cpu()
    assert torch.equal(layer.weight.detach(), weight)


@pytest.mark.parametrize("index", range(DEVICES))
def test_gradients_that_vanish_are_zeros_without_memory(index: int, sim: Emulator) -> None:
    x = A.to(f"sim:{index}").requires_grad_()
    (slope,) = torch.autograd.grad(x.abs().sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad((slope * x).sum(), x)
    assert torch.equal(bend.cpu(), A.sign())
    zeros = torch._efficientzerotensor((3, 2), device=f"sim:{index}")
    assert (zeros._is_zerotensor(), zeros.device.index) == (True, index)
    assert torch.equal((zeros + 1).cpu(), torch.ones(3, 2))
