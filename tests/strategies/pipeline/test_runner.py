"""Messages between chunks are such as the transport carries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shoal.strategies.pipeline.runner import LinkMessage, StageLinks


def test_what_stands_for_none_is_on_the_device_of_the_transport() -> None:
    """It was on the CPU, which NCCL refuses: a gradient that is missing ended the step."""
    sent: list[Tensor] = []
    device = torch.device("meta")  # any but the CPU
    group = SimpleNamespace(device=device, start_send=lambda tensor, *_: sent.append(tensor))
    stage: Any = SimpleNamespace(group=group, rank=0, num_chunks=2, rank_of_chunk=[0, 1])
    StageLinks(stage).send(LinkMessage.GRADIENTS, 0, 1, [None])
    assert [tensor.device for tensor in sent] == [device]
