"""What only a process of its own can show: faults, forks, exits, and bad input before anything is registered."""

from __future__ import annotations

import signal

import pytest

from tests.emulator.devices import run_alone

ENABLE = "import torch, lowtide.emulator as emulator\nsim = emulator.enable('64MiB')\n"


def one_line(code: str, **environment: str) -> str:
    """Return the only line that a script prints."""
    done = run_alone(code, **environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    return lines[0]


def refusal(call: str, **environment: str) -> str:
    """Return the type and the message of what `call` raises."""
    return one_line(
        "import torch, lowtide.emulator as emulator\n"
        f"try:\n    {call}\nexcept Exception as error:\n    print(type(error).__name__, error)\n",
        **environment,
    )


def test_a_host_read_of_device_memory_faults() -> None:
    done = run_alone(
        ENABLE + "import ctypes\nx = torch.ones(1000).to('sim')\nctypes.string_at(x.data_ptr(), 8)\nprint('read')"
    )
    assert done.returncode == -signal.SIGSEGV
    assert "read" not in done.stdout


def test_a_host_write_of_device_memory_faults() -> None:
    done = run_alone(ENABLE + "import ctypes\nx = torch.ones(1000).to('sim')\nctypes.memset(x.data_ptr(), 0, 8)")
    assert done.returncode == -signal.SIGSEGV


def test_a_forked_child_that_uses_the_device_is_refused() -> None:
    text = one_line(
        ENABLE
        + """
import os
x = torch.ones(10).to('sim')
if (child := os.fork()) == 0:
    try:
        x + x
    except RuntimeError as error:
        print(str(error).splitlines()[0])
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert (x + x).sum().item() == 20
"""
    )
    assert "forked" in text
    assert "spawn" in text


def test_a_forked_child_may_drop_device_tensors_and_use_the_cpu() -> None:
    text = one_line(
        ENABLE
        + """
import gc, os
x, pinned = torch.ones(10).to('sim'), torch.ones(10).pin_memory()
if (child := os.fork()) == 0:
    del x, pinned
    gc.collect()
    torch.ones(1000).sum().item()
    os._exit(0)
print(os.waitpid(child, 0)[1], (x + x).sum().item(), pinned.sum().item())
"""
    )
    assert text == "0 20.0 10.0"


def test_data_loaders_with_workers_pin_and_feed_the_device() -> None:
    text = one_line(
        ENABLE
        + """
from torch.utils.data import DataLoader, TensorDataset
torch.zeros(1).to('sim')
data = TensorDataset(torch.arange(32.0))
loader = DataLoader(data, batch_size=8, num_workers=2, pin_memory=True)
batches = [x for x, in loader]
assert all(x.is_pinned() for x in batches)
print(sum(x.to('sim', non_blocking=True).sum().item() for x in batches))
"""
    )
    assert text == "496.0"


@pytest.mark.parametrize("last", [pytest.param("loss.backward()", marks=pytest.mark.slow), "x.sum().item()"])
def test_the_process_ends_cleanly_whatever_came_last(last: str) -> None:
    code = (
        ENABLE
        + """
layers = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(10)]).to('sim')
x = torch.randn(8, 32).to('sim').requires_grad_()
x.register_hook(lambda gradient: gradient * 2)
loss = layers(x).sum()
"""
        + last
    )
    for _ in range(3):
        done = run_alone(code)
        assert (done.returncode, done.stderr) == (0, "")


def test_enabling_twice_is_the_same_emulator_and_with_other_settings_refused() -> None:
    code = "first = emulator.enable('64MiB'); assert emulator.enable('64MiB') is first is emulator.current(); "
    text = refusal(code + "emulator.enable('32MiB')")
    assert text.startswith("BadArgument the emulator is enabled already")
    assert "configure" in text


def test_enabling_after_the_first_backward_is_refused() -> None:
    text = refusal("torch.ones(1, requires_grad=True).sum().backward(); emulator.enable('64MiB')")
    assert text.startswith("BadArgument PyTorch's autograd started in this process before")


def test_another_backend_in_the_slot_is_named() -> None:
    text = refusal("torch.utils.rename_privateuse1_backend('npu'); emulator.enable('64MiB')")
    assert text.startswith("BadArgument another backend, 'npu'")


def test_a_missing_compiler_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = str(tmp_path_factory.mktemp("cache"))
    text = refusal("emulator.enable('64MiB')", LOWTIDE_CACHE=cache, CXX="no-such-compiler")
    assert text.startswith("NativeUnavailable no C++ compiler found")


def test_a_tensor_of_the_wrong_device_is_refused() -> None:
    text = refusal("emulator.enable('64MiB'); torch.ones(3).to('sim') + torch.ones(3)")
    assert text.startswith("RuntimeError Expected all tensors to be on the same device")
    assert "sim:0 and cpu" in text


def test_several_devices_have_memories_of_their_own_and_copy_between_each_other() -> None:
    text = one_line(
        """
import torch, lowtide.emulator as emulator
sim = emulator.enable('32MiB', devices=2, races=True)
a = torch.arange(2**20, dtype=torch.float32).to('sim:1')
try:
    a + torch.ones(2**20, device='sim:0')
except RuntimeError as error:
    assert 'sim:0' in str(error) and 'sim:1' in str(error)
b = (a * 2).to('sim:0')
same_bytes = sim.stats(0).live_bytes == sim.stats(1).live_bytes
print(b.device, torch.equal(b.cpu(), a.cpu() * 2), same_bytes, sim.races())
"""
    )
    assert text == "sim:0 True True ()"
