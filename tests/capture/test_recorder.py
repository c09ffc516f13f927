"""A recorder knows a storage's kind even if it is gone when the step ends."""

from __future__ import annotations

import torch
from torch import nn

from lowtide.capture.recorder import Recorder
from lowtide.core import log
from lowtide.core.trace import Kind, Reach
from tests.capture.made_up import Log


class MadeUpSteps:
    """An observation whose log says what it is told to; tensors have serials by their address."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.log = Log()

    def serial_of(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def observe(self, *, names: bool, log: bool) -> None:
        pass

    def take_log(self) -> log.Log:
        return log.Log(entries=self.log.entries, names=self.log.names, end_ns=self.log.now_ns)

    def forget_log(self) -> None:
        pass

    def mark_module(self, name: str) -> None:
        pass


def test_a_gradient_that_the_step_found_and_freed_is_one_still() -> None:
    model = nn.Linear(8, 8, bias=False)
    model.weight.grad = torch.ones(8, 8)
    steps = MadeUpSteps()
    found = steps.serial_of(model.weight.grad)
    recorder = Recorder(steps, [model], [], reach=Reach.TOUCHED)
    recorder.start(static_bytes=512)
    made = torch.zeros(8, 8)
    steps.log.add(log.Event.EXISTS, found, 256).op("aten::mm").add(log.Event.FREE, found, 256)
    steps.log.op("aten::mul", makes=steps.serial_of(made), nbytes=256).op("aten::add")
    model.weight.grad = made
    recorded = recorder.stop()
    assert recorded is not None
    assert [block.kind for block in recorded.trace.storages] == [Kind.GRAD, Kind.GRAD]
    assert dict(recorded.trace.heirs()) == {1: 0}
