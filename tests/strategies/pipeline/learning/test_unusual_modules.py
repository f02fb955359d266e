"""Modules that do more than turn tensors into tensors: they count, have hooks, pack sequences."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune, rnn

import shoal
from shoal.errors import ShoalError
from strategies.pipeline.comparison import (
    assert_same_gradients,
    assert_same_step,
    batch,
    check_gradients,
    layers,
)


def test_learning_leaves_no_trace_in_attributes() -> None:
    """A forward that counts, collects and caches is called as often as in one process."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.calls, self.sizes, self.seen = 0, [], {"rows": 0}
            self.written, self.cache = torch.zeros(()), None
            self.register_buffer("replaced", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.sizes.append(len(x))
            self.seen["rows"] += len(x)
            self.written += 1
            self.replaced = self.replaced + 1
            self.cache = torch.ones(len(x)) if self.cache is None else self.cache * 2
            if not hasattr(self, "first"):
                self.first = self.calls
            for block in self.blocks:
                x = block(x)
            return x * 0.5 if self.calls > 2 else x

        def kept(self):
            numbers = [float(each) for each in (self.written, self.replaced, self.cache[0])]
            return [self.calls, self.sizes, self.seen["rows"], self.first, *numbers]

    def train():
        torch.manual_seed(0)
        module = Counting().double()
        plain = copy.deepcopy(module)
        model = shoal.as_distributed(module, strategy="pipeline", micro_batches=1)
        x, y = batch()
        for _ in range(3):
            loss = model.train_step(x, y, F.mse_loss)
            torch.testing.assert_close(loss, F.mse_loss(plain(x), y).detach())
        assert module.kept() == plain.kept()

    shoal.run(train, 2, "memory")


@pytest.mark.parametrize("cut", ["encoder", "head"])
def test_results_that_look_at_what_they_are_made_of(cut) -> None:
    """A packed sequence refuses to be made of numbers: between units, and as an output."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.rnn, self.encoder = (nn.LSTM(4, 4, batch_first=True) for _ in range(2))

        def forward(self, x):
            steps = self.embedding(x)[:, None].repeat(1, 3, 1)
            packed = rnn.pack_padded_sequence(steps, torch.tensor([3, 1]), batch_first=True)
            packed, _ = self.encoder(self.rnn(packed)[0])
            return packed, self.head(rnn.unpack_sequence(packed)[0][-1:])

    def loss_fn(output, y):
        return output[0].data.square().mean() + F.mse_loss(output[1], y[:1])

    def train():
        torch.manual_seed(0)
        module = Recurrent().double()
        plain = copy.deepcopy(module)
        model = shoal.as_distributed(module, strategy="pipeline", micro_batches=3, cut=[cut])
        x, y = batch()
        model.train_step(x, y, loss_fn)
        for inputs, targets in zip(x.chunk(3), y.chunk(3), strict=True):
            (loss_fn(plain(inputs), targets) / 3).backward()
        assert_same_gradients(model, plain)
        with torch.no_grad():
            torch.testing.assert_close(model(x[:2]), plain(x[:2]))

    shoal.run(train, 2, "memory")


@dataclass
class _Checked:
    """Looks at what it is made of."""

    x: torch.Tensor
    count: int

    def __post_init__(self) -> None:
        assert isinstance(self.x, torch.Tensor)


@dataclass
class _Unknown(_Checked):
    """One that torch is not told of."""


torch.utils._pytree.register_dataclass(_Checked)


class _Handing(nn.Module):
    """Blocks that hand such objects on."""

    class Block(nn.Linear):
        def forward(self, state):
            return type(state)(super().forward(state.x), state.count + 1)

    def __init__(self, kind) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(_Handing.Block(4, 4) for _ in range(3))

    def forward(self, x):
        state = self.kind(x, 0)
        for block in self.blocks:
            state = block(state)
        return state.x * state.count


def test_dataclasses_between_units() -> None:
    check_gradients(lambda: _Handing(_Checked).double(), 3)
    with pytest.raises(ShoalError, match=r"register_dataclass\(_Unknown\)"):
        check_gradients(lambda: _Handing(_Unknown).double(), 3)


def _spectral(module):
    for layer in module[1:]:
        nn.utils.spectral_norm(layer)


def _pruned(module):
    for layer in module:
        prune.random_unstructured(layer, "weight", 0.5)


def _scaled(module):
    for layer in module:
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        layer.register_forward_hook(lambda layer, _, output: output + layer.bias.square())


@pytest.mark.parametrize("prepare", [_spectral, _pruned, _scaled])
@pytest.mark.parametrize("options", [{}, {"schedule": "interleaved"}, {"data": 2, "zero": 3}])
@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_hooks_that_compute_with_parameters_and_buffers(prepare, options) -> None:
    """They run where the unit runs: what they need is there, and only there."""

    def train():
        torch.manual_seed(0)
        module = layers()
        prepare(module)
        plain = layers()
        torch.manual_seed(0)
        prepare(plain)
        plain.load_state_dict(module.state_dict())
        one = torch.optim.SGD(plain.parameters(), 0.1)
        model, optimizer = shoal.as_distributed(
            module, torch.optim.SGD(module.parameters(), 0.1), strategy="pipeline",
            micro_batches=2, **options,
        )  # fmt: skip
        for number in range(3):
            x, y = batch(number)
            optimizer.zero_grad()
            model.train_step(x, y, F.mse_loss)
            optimizer.step()
            one.zero_grad()
            for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.mse_loss(plain(inputs), targets) / 2).backward()
            one.step()
        torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()))

    shoal.run(train, 4 if "data" in options else 2, "memory")


def test_backward_hooks_see_all_gradients() -> None:
    """Also those of values that travel."""

    def gradients(module, train):
        seen = {}
        for name, layer in list(module.named_children())[1:]:  # the first has no gradient of inputs
            layer.register_full_backward_hook(
                lambda _, to, of, name=name: seen.update({name: (*to, *of)})
            )
        train()
        return seen

    def train():
        torch.manual_seed(0)
        module = layers()
        plain = copy.deepcopy(module)
        model = shoal.as_distributed(module, strategy="pipeline", micro_batches=1)
        x, y = batch()
        found = gradients(module, lambda: model.train_step(x, y, F.mse_loss))
        expected = gradients(plain, lambda: F.mse_loss(plain(x), y).backward())
        for name, seen in found.items():
            torch.testing.assert_close(seen, expected[name])
        return list(found)

    assert shoal.run(train, 2, "memory") == [["1"], ["3", "2"]]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2)])
def test_buffers_of_other_ranks_are_named(order) -> None:
    """Whether forward reads one, or the module itself that is called out of order."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(4))

        def forward(self, x):
            for number in order:
                x = self.blocks[number](x)
            return x * self.blocks[0].running_var

    with pytest.raises(ShoalError, match=r"has the buffer blocks\.[01] \(running_"):
        check_gradients(lambda: Net().double(), 2)


class _Penalized(nn.Module):
    """Looks at the parameters of all its layers, before and after it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x.to(next(self.blocks[0].parameters()).dtype)
        names = [name for name, _ in self.named_parameters()]
        assert names[0] == "scale"
        assert len(names) == len(set(names)) == 9
        for block in self.blocks:
            assert sum(p.numel() for p in block.parameters()) == 20
            x = block(x).tanh()
        return x + 0.1 * sum(p.square().sum() for p in self.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "interleaved"}, {"schedule": "zero-bubble"}, {"data": 2, "zero": 3}],
)
def test_parameters_inside_of_forward(options) -> None:
    """They are those of all ranks, with gradients; outside they are this rank's."""
    ranks = 4 if "data" in options else 2
    check_gradients(lambda: _Penalized().double(), ranks, min_group_bytes=100, **options)


def test_parameters_outside_of_forward_are_this_ranks() -> None:
    def train():
        module = _Penalized().double()
        model = shoal.as_distributed(module, strategy="pipeline", micro_batches=2)
        before = len(list(module.parameters()))
        model.train_step(*batch(), F.mse_loss)
        assert len(list(module.parameters())) == before
        with model.full_parameters():
            whole = len(list(module.parameters()))
        model.train_step(*batch(), F.mse_loss)  # nobody takes those of others for new ones
        return before, whole

    assert shoal.run(train, 2, "memory") == [(5, 9), (4, 9)]


class _Weighted(nn.Module):
    """A loss with a parameter of its own, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.log_var = layers(), nn.Parameter(torch.ones(4))

    def forward(self, x, y=None):
        x = self.blocks(x)
        return x if y is None else self.loss(x, y)

    def loss(self, x, y):
        return ((x - y).square().mean(0) * (-self.log_var).exp() + self.log_var).sum()


def test_a_loss_with_parameters_inside_of_forward() -> None:
    def train():
        torch.manual_seed(0)
        module = _Weighted().double()
        plain = copy.deepcopy(module)
        model = shoal.as_distributed(module, strategy="pipeline", micro_batches=3)
        x, y = batch()
        loss = model.train_step((x, y), y, lambda loss, _: loss)
        assert_same_step(model, loss, plain, plain(x, y))

    shoal.run(train, 2, "memory")


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, x, y: model.loss(x, y),
        lambda model, x, y: F.mse_loss(x, y) * float(model.log_var.sum()),
        lambda model, x, y: F.mse_loss(x, y) + sum(p.square().sum() for p in model.parameters()),
    ],
)
def test_a_loss_function_with_parameters_of_other_ranks(loss_fn) -> None:
    """The error says where such a loss belongs; a sum over this rank's would be wrong silently."""

    def train():
        model = shoal.as_distributed(_Weighted().double(), strategy="pipeline", micro_batches=3)
        model.train_step(*batch(), lambda x, y: loss_fn(model, x, y))

    with pytest.raises(ShoalError, match=r"pipeline have .*A loss .* belongs into its forward"):
        shoal.run(train, 2, "memory")
