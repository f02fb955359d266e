"""What pipelines once got wrong, or refused without need."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.errors import MismatchError, ShoalError
from shoal.strategies.pipeline.units import find_units
from strategies.pipeline.comparison import assert_same_step, batch, check_gradients, layers


@pytest.mark.parametrize("data", [1, 2])
def test_last_backward_that_reaches_no_parameter(data) -> None:
    """Of two chunks the first is frozen, and its backward is the last: the other's still count."""

    def build():
        module = layers(8)
        module[:2].requires_grad_(False)
        return module

    options = {"schedule": "interleaved"} | ({"data": 2, "zero": 2} if data == 2 else {})
    check_gradients(build, 2 * data, **options)


def test_chunk_without_parameters_at_the_beginning() -> None:
    """Nothing comes back to a first chunk that only passes its input on."""

    def build():
        return nn.Sequential(nn.Identity(), nn.Flatten(), *layers(3))

    check_gradients(build, 2, schedule="interleaved", cut=["1", "2", "4"])


def test_writing_into_what_came_from_another_rank() -> None:
    """As a ReLU in place does in one process, as a unit and between units."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.body(x)
            kept = []
            for block in self.blocks:
                x = F.relu(block(x), inplace=True)
                kept.append(x)
            return x + sum(kept)

    cut = ["body.1", "body.2", "blocks.0", "blocks.1", "blocks.2"]
    check_gradients(lambda: Net().double(), 6, cut=cut)


def test_lists_in_lists_and_wrappers_are_cut() -> None:
    """Nobody calls a list itself, so it cannot be left out as a whole; its members can."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

        def forward(self, x):
            return self.layers(x)

    model = nn.Module()
    model.groups = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2))
    model.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])
    model.stages = nn.ModuleList([Stage(), Stage()])
    names = [unit.name for unit in find_units(model, 5) if unit.is_in_chain]
    assert names == ["groups.0.0", "groups.1.0", "stages.0.layers.0", "stages.0.layers.1",
                     "stages.1"]  # fmt: skip


@pytest.mark.parametrize("is_target", [False, True])
def test_other_values_on_one_pipeline_are_told(is_target) -> None:
    """The first stage's inputs and the last one's targets would not belong together."""

    def train():
        model = shoal.as_distributed(layers(), strategy="pipeline")
        pair = list(batch())
        pair[is_target] = pair[is_target] + shoal.world().rank
        model.train_step(*pair, F.mse_loss)

    with pytest.raises(MismatchError, match="same batch"):
        shoal.run(train, 2, "memory")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_around_some_steps(device) -> None:
    """Another precision is another way through the model."""

    def train():
        torch.manual_seed(0)
        module = layers().float().to(device)
        plain = copy.deepcopy(module)
        model = shoal.as_distributed(module, strategy="pipeline", micro_batches=2)
        x, y = (part.float().to(device) for part in batch())
        for is_on in (False, True, False):
            with torch.autocast(device, torch.bfloat16, enabled=is_on):
                loss = model.train_step(x, y, lambda out, y: F.mse_loss(out.float(), y))
                torch.testing.assert_close(loss, F.mse_loss(plain(x).float(), y).detach())

    shoal.run(train, 2, "memory")


def test_inference_mode() -> None:
    def predict():
        torch.manual_seed(0)
        module = layers()
        plain = copy.deepcopy(module)
        model = shoal.as_distributed(module, strategy="pipeline")
        x, y = batch()
        with torch.inference_mode():
            torch.testing.assert_close(model(x), plain(x))
        model.train_step(x, y, F.mse_loss)

    shoal.run(predict, 2, "memory")


def test_calling_the_module_inside() -> None:
    def predict():
        model = shoal.as_distributed(layers(), strategy="pipeline")
        float(model.module(batch()[0]).sum())

    with pytest.raises(ShoalError, match="call the wrapped model itself"):
        shoal.run(predict, 2, "memory")


def test_losses_left_in_attributes() -> None:
    """As layers of experts do: the model adds them up after its blocks, on the last rank."""

    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.loss, self.longest = nn.Linear(4, 4), 0.0, torch.ones(0)

        def forward(self, x):
            if len(self.longest) < len(x):  # read by nobody: its shape is nobody's business
                self.longest = torch.ones(len(x))
            y = self.layer(x)
            self.loss = y.abs().mean(-1, keepdim=True)
            return x + y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Balanced() for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x + sum(block.loss for block in self.blocks)

    check_gradients(lambda: Net().double(), 4)


@pytest.mark.parametrize("is_synchronized", [True, False])
def test_batch_norm_beside_data_parallelism(is_synchronized) -> None:
    """Layers keep the class that was given to them, and buffers stay as graphs know them."""

    def train():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), *layers(2)).double()
        plain = copy.deepcopy(module)
        model = shoal.as_distributed(
            module, strategy="pipeline", data=2, micro_batches=2, sync_batchnorm=is_synchronized
        )
        x, y = batch(items=8)
        group = model.data_group
        model.train_step(x.chunk(2)[group.rank], y.chunk(2)[group.rank], F.mse_loss)
        parts = [[0, 1], [2, 3], [4, 5], [6, 7]]
        if is_synchronized:  # micro-batches of both pipelines are one
            parts = [parts[0] + parts[2], parts[1] + parts[3]]
        for rows in parts:
            (F.mse_loss(plain(x[rows]), y[rows]) / len(parts)).backward()
        found = dict(model.full_gradients())
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)
        if is_synchronized:
            torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()))

    shoal.run(train, 4, "memory")


def test_uneven_batches_whose_parameters_are_shared_out() -> None:
    """Pipelines meet in every pass, so they have as many; one without rows goes along."""

    def train():
        torch.manual_seed(0)
        module = layers()
        plain = copy.deepcopy(module)
        model = shoal.as_distributed(
            module, strategy="pipeline", data=2, zero=3, micro_batches=4, min_group_bytes=100
        )
        x, y = batch(items=6)
        for at in (5, 6):
            own = slice(0, at) if model.data_group.rank == 0 else slice(at, 6)
            model.zero_grad()
            plain.zero_grad()
            loss = model.train_step(x[own], y[own], F.mse_loss)
            assert_same_step(model, loss, plain, F.mse_loss(plain(x), y))

    shoal.run(train, 4, "memory")
