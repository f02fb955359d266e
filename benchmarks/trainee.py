"""What all contenders of a training contest have in common: the model, AdamW, the batch, the loop.

They differ in how the ranks communicate, and in nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from gpt import GPT, VOCABULARY, Shape
from torch import Tensor, nn
from torch.optim import AdamW

ADAMW = ("default", "loop", "fused", "foreach")


@dataclass(frozen=True)
class Course:
    """What is trained, and with what.

    Attributes:
        shape: Of the model, and of the batch on one rank.
        adamw: Which of torch's implementations of AdamW; "loop" goes parameter by parameter,
            "default" is that of a script that does not choose: torch loops then, and shoal fuses.
        lr: The rate.
    """

    shape: Shape
    adamw: str = "fused"
    lr: float = 1e-4

    def model(self) -> GPT:
        """The same one each time."""
        torch.manual_seed(0)
        return GPT(self.shape)

    @property
    def adamw_options(self) -> dict[str, Any]:
        """Arguments of AdamW; of what can be chosen, all else is refused then."""
        is_chosen = self.adamw != "default"
        chosen = {name: name == self.adamw for name in ("fused", "foreach") if is_chosen}
        return {"lr": self.lr, **chosen}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> AdamW:
        """AdamW as every contender has it."""
        return AdamW(parameters, **self.adamw_options)

    def tokens(self, rank: int) -> Tensor:
        """A rank's batch, always the same, with the token that follows the last."""
        generator = torch.Generator().manual_seed(rank + 1)
        size = (self.shape.batch, self.shape.length + 1)
        return torch.randint(VOCABULARY, size, generator=generator)


class Trainee(ABC):
    """A model in training, on one rank."""

    is_common: ClassVar[bool] = True
    """Whether the ranks train one model together, and so have the same parameters."""

    def __init__(self, course: Course, rank: int, model: Any, optimizer: Any) -> None:
        """Takes what a contender has made of the course's model and optimizer."""
        self.model, self.optimizer = model, optimizer
        self._tokens = course.tokens(rank)
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """Forward, backward, AdamW; gradients are kept until the next."""
        self._clear()
        logits = self.model(self._tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        self._backward(loss)
        self._update()
        self.losses.append(loss.detach())

    def _clear(self) -> None:
        self.optimizer.zero_grad()

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _update(self) -> None:
        self.optimizer.step()

    @property
    def has_learned(self) -> bool:
        """Whether the loss fell; it must, for the batch is always the same."""
        return not self.losses or bool(self.losses[-1] < self.losses[0])

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """All parameters whole, under the model's own names; every rank calls it."""
