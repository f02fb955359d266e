"""What users see of a pipelined model besides training: predictions, states, clipping, errors."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.errors import MismatchError, PeerError, ShoalError
from shoal.strategies.pipeline import PipelineParallelModel, bubble, draw
from strategies.models import GPT, random_tokens
from strategies.pipeline.tasks import TASKS
from strategies.pipeline.training import optimizer_of


def wrapped(task="gpt", optimizer=optimizer_of, **options):
    torch.manual_seed(0)
    module = TASKS[task].build()
    plain = copy.deepcopy(module)
    made = shoal.as_distributed(module, optimizer(module), strategy="pipeline", **options)
    return (*made, plain)


def step(model, optimizer, task="gpt", number=0, items=8):
    optimizer.zero_grad()
    loss = model.train_step(*TASKS[task].batch(number, items), TASKS[task].loss)
    optimizer.step()
    return loss


def run(fn, ranks=3, **kwargs):
    return shoal.run(fn, ranks, "memory", **kwargs)


# Predictions ------------------------------------------------------------------------------------


def test_predictions_are_everywhere() -> None:
    def predict():
        model, _, plain = wrapped("unet")
        x, _ = TASKS["unet"].batch(0, 5)
        with torch.no_grad():
            output, expected = model(x), plain(x)
            with model.predicting():
                again = [model(x)["y"] for _ in range(2)]
        torch.testing.assert_close(output, expected)
        for one in again:
            torch.testing.assert_close(one, expected["y"])
        return type(output)

    assert run(predict) == [dict] * 3


def test_predictions_of_the_last_stage_only() -> None:
    def predict():
        model, _, plain = wrapped(outputs="last", schedule="interleaved", chunks=2)
        x, _ = TASKS["gpt"].batch(0, 5)
        with torch.no_grad():
            output = model(x)
            if output is not None:
                torch.testing.assert_close(output, plain(x))
        return output is None

    assert run(predict, 2) == [True, False]


def test_predictions_follow_training() -> None:
    def train():
        model, optimizer, _ = wrapped()
        x, _ = TASKS["gpt"].batch(0, 5)
        with model.predicting():
            before = model(x)
        step(model, optimizer)
        with torch.no_grad():
            after = model(x)
        plain = GPT(layers=4).double()
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(after, plain(x).detach())
        assert not torch.equal(before, after)

    run(train)


def test_a_plain_backward_names_train_step() -> None:
    def train():
        model, _, _ = wrapped()
        x, y = TASKS["gpt"].batch(0, 4)
        loss = TASKS["gpt"].loss(model(x), y)
        with pytest.raises(ShoalError, match="train_step"):
            loss.backward()

    run(train, 2)


# States -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"data": 2, "zero": 3}, {"data": 2, "zero": 1}])
def test_states_are_those_of_the_plain_ones(options) -> None:
    def save():
        model, optimizer, plain = wrapped(micro_batches=2, **options)
        plain_optimizer = optimizer_of(plain)
        for number in range(2):
            x, y = TASKS["gpt"].batch(number, 8)
            step(model, optimizer, number=number)
            plain_optimizer.zero_grad()
            TASKS["gpt"].loss(plain(x), y).backward()
            plain_optimizer.step()
        torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()))
        torch.testing.assert_close(optimizer.state_dict(), plain_optimizer.state_dict())
        return model.state_dict(), optimizer.state_dict()

    def load(saved):
        model, optimizer, _ = wrapped(micro_batches=3)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        torch.testing.assert_close(model.state_dict(), saved[0])
        torch.testing.assert_close(optimizer.state_dict(), saved[1])
        return float(step(model, optimizer, number=2))

    saved = run(save, 4 if options else 2)[0]
    assert len(set(run(load, args=(saved,)))) == 1


def test_missing_and_unexpected_keys() -> None:
    def load():
        model, _, _ = wrapped()
        state = model.state_dict()
        del state["norm.weight"]
        with pytest.raises(RuntimeError, match=r"norm\.weight"):
            model.load_state_dict(state)
        assert model.load_state_dict(state, strict=False).missing_keys == ["norm.weight"]

    run(load, 2)


def test_full_parameters_and_changes() -> None:
    def change():
        model, _, plain = wrapped(data=2, zero=3)
        names = [name for name, _ in plain.named_parameters()]
        assert len(list(model.named_parameters())) < len(names)
        with model.full_parameters():
            assert [name for name, _ in model.named_parameters()] == names
            for parameter in model.parameters():
                parameter.data.add_(1.0)
        assert len(list(model.named_parameters())) < len(names)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name] + 1.0)

    run(change, 4)


def test_an_optimizer_built_for_this_rank_only() -> None:
    def train():
        torch.manual_seed(0)
        model = shoal.as_distributed(TASKS["gpt"].build(), strategy="pipeline")
        optimizer = shoal.optim.PipelineParallelOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model
        )
        step(model, optimizer)
        return len(optimizer.state_dict()["state"])

    assert set(run(train, 2)) == {len(list(GPT(layers=4).parameters()))}


def test_optimizers_that_need_whole_parameters() -> None:
    def muon(module):
        return [
            torch.optim.Muon([p for p in module.parameters() if p.dim() == 2], lr=0.01),
            torch.optim.AdamW([p for p in module.parameters() if p.dim() != 2], lr=0.01, eps=1e-3),
        ]

    def train():
        model, optimizers, plain = wrapped("disorder", muon, micro_batches=2, data=2, zero=1)
        others = muon(plain)
        x, y = TASKS["disorder"].batch(0, 8)
        data = model.data_group.rank
        model.train_step(x[4 * data : 4 * data + 4], y[4 * data : 4 * data + 4],
                         TASKS["disorder"].loss)  # fmt: skip
        TASKS["disorder"].loss(plain(x), y).backward()
        model.clip_grad_norm_(0.05)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        for one in (*optimizers, *others):
            one.step()
        torch.testing.assert_close(
            model.state_dict(), dict(plain.state_dict()), rtol=1e-4, atol=1e-4
        )

    run(train, 4)


def test_optimizers_that_couple_everything_are_refused() -> None:
    def wrap():
        with pytest.raises(ValueError, match="LBFGS may couple"):
            wrapped(optimizer=lambda module: torch.optim.LBFGS(module.parameters()))

    run(wrap, 2)


# Gradients --------------------------------------------------------------------------------------


def test_torch_never_clips_by_a_stage() -> None:
    def clip():
        model, _, _ = wrapped()
        model.train_step(*TASKS["gpt"].batch(0, 4), TASKS["gpt"].loss)
        with pytest.raises(ShoalError, match="clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    run(clip, 2)


def test_norm_is_that_of_one_process() -> None:
    def norm():
        model, _, plain = wrapped(data=2, zero=2)
        x, y = TASKS["gpt"].batch(0, 8)
        data = model.data_group.rank
        model.train_step(x[4 * data : 4 * data + 4], y[4 * data : 4 * data + 4], TASKS["gpt"].loss)
        TASKS["gpt"].loss(plain(x), y).backward()
        found = [float(model.clip_grad_norm_(1e9, kind)) for kind in (2.0, 1.0, float("inf"))]
        expected = [
            float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9, kind))
            for kind in (2.0, 1.0, float("inf"))
        ]
        assert found == pytest.approx(expected)

    run(norm, 4)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_frozen_first_stages(schedule) -> None:
    def train():
        torch.manual_seed(0)
        module = TASKS["gpt"].build()
        module.head.weight = nn.Parameter(module.head.weight.detach().clone())
        for part in (module.embedding, module.blocks[:2]):
            part.requires_grad_(False)
        module.position.requires_grad_(False)
        plain = copy.deepcopy(module)
        model, optimizer = shoal.as_distributed(
            module, optimizer_of(module), strategy="pipeline", schedule=schedule, micro_batches=3
        )
        for number in range(2):
            step(model, optimizer, number=number)
        needs_grad = model.pipeline.last_route.needs_grad
        assert "blocks.0" not in {value_id.name for value_id in needs_grad}
        model.requires_grad_(True)  # later on: everything
        step(model, optimizer, number=2)
        return model.state_dict(), plain

    (state, plain), *_ = run(train, 4)
    optimizer = optimizer_of(plain)
    for number in range(3):
        if number == 2:
            plain.requires_grad_(True)
        optimizer.zero_grad()
        x, y = TASKS["gpt"].batch(number, 8)
        TASKS["gpt"].loss(plain(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(state, dict(plain.state_dict()))


def test_uneven_batches_and_weights() -> None:
    """Two pipelines with 5 and 2 items in up to three micro-batches; then one does not count."""

    def train():
        model, _, plain = wrapped(data=2, zero=2, micro_batches=3)
        x, y = TASKS["gpt"].batch(0, 7)
        own = slice(0, 5) if model.data_group.rank == 0 else slice(5, 7)
        loss = model.train_step(x[own], y[own], TASKS["gpt"].loss)
        expected = TASKS["gpt"].loss(plain(x), y)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for (_, got), parameter in zip(model.full_gradients(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad)
        model.zero_grad()
        plain.zero_grad()
        weight = 5 if model.data_group.rank == 0 else 0
        loss = model.train_step(x[own], y[own], TASKS["gpt"].loss, weight=weight)
        expected = TASKS["gpt"].loss(plain(x[:5]), y[:5])
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for (_, got), parameter in zip(model.full_gradients(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad)

    run(train, 4)


def test_lengths_may_differ() -> None:
    def train():
        model, optimizer, plain = wrapped(micro_batches=2)
        for length in (3, 5, 3):
            tokens = random_tokens(length, 29, 4, length)
            loss = model.train_step(tokens, tokens, TASKS["gpt"].loss)
            expected = TASKS["gpt"].loss(plain(tokens), tokens)
            torch.testing.assert_close(loss, expected.detach())
        return optimizer

    run(train)


def test_dropout_repeats_and_differs_between_stages() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)
            )

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    def train():
        torch.manual_seed(0)
        model = shoal.as_distributed(Dropping(), strategy="pipeline", micro_batches=2)
        losses = []
        for _ in range(2):
            torch.manual_seed(1)
            losses += [float(model.train_step(torch.ones(4, 4), torch.ones(4, 4), F.mse_loss))
                       for _ in range(2)]  # fmt: skip
        return losses

    for first, second, *again in run(train, 2):
        assert [first, second] == again
        assert first != second


# Where things are -------------------------------------------------------------------------------


def test_each_stage_holds_its_layers_only() -> None:
    def measure():
        gc.collect()
        model, optimizer, plain = wrapped()
        step(model, optimizer)
        memory = shoal.world().stats().memory
        own = sum(parameter.nbytes for parameter in model.parameters())
        return own, memory["parameters"].current, sum(p.nbytes for p in plain.parameters())

    found = run(measure, 4)
    own, held, total = zip(*found, strict=True)
    assert sum(own) == total[0]
    for mine, actual in zip(own, held, strict=True):
        assert mine <= actual <= mine + 4 * 128
    assert max(own) < 0.4 * total[0]


def test_bytes_of_a_step() -> None:
    """One value forward and one gradient back for each micro-batch and boundary."""

    def count():
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        model = shoal.as_distributed(module, strategy="pipeline", micro_batches=4)
        x = torch.randn(8, 16)
        model.train_step(x, x, F.mse_loss)
        before = shoal.world().stats()
        model.train_step(x, x, F.mse_loss)
        after = shoal.world().stats()
        return after["send"].num_bytes - before["send"].num_bytes

    activation = 8 * 16 * 4
    assert run(count) == [activation, 2 * activation, activation]


def test_trace() -> None:
    def train():
        model, optimizer, _ = wrapped(micro_batches=4)
        step(model, optimizer)
        return model.gather_trace()

    for spans in run(train):
        assert len(spans) == 3 * 2 * 4
        assert 0 < bubble(spans) < 1
        assert "measured" in str(draw("1f1b", 3, 4, trace=spans))


def test_description_says_who_has_what_and_what_travels() -> None:
    def describe():
        model, optimizer, _ = wrapped("unet")
        step(model, optimizer, "unet")
        return model.describe()

    text = run(describe)[0]
    assert "stage 0, chunk 0" in text
    assert "chunk 0 -> chunk 1" in text


def test_meta_device() -> None:
    def train():
        with torch.device("meta"):
            module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        model = shoal.as_distributed(module, strategy="pipeline", seed=3)
        return model.state_dict()

    torch.manual_seed(3)
    expected = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).state_dict()
    for state in run(train):
        torch.testing.assert_close(state, dict(expected))


def test_batch_norm_statistics_are_saved() -> None:
    def train():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        model = shoal.as_distributed(module, strategy="pipeline", micro_batches=2)
        for number in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            model.train_step(x, x, F.mse_loss)
        return model.state_dict()

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    for number in range(2):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        for part in x.chunk(2):
            plain(part)
    for state in run(train):
        torch.testing.assert_close(state, dict(plain.state_dict()))


# Errors -----------------------------------------------------------------------------------------


def test_a_failing_stage_reaches_all(tmp_path) -> None:
    class Failing(nn.Linear):
        def forward(self, x):
            if self.training and shoal.world().rank == 1 and self.is_armed:
                raise ArithmeticError("no luck")
            return super().forward(x)

        is_armed = False

    def train():
        module = nn.Sequential(nn.Linear(2, 2), Failing(2, 2), nn.Linear(2, 2))
        model = shoal.as_distributed(module, strategy="pipeline", micro_batches=4)
        x = torch.ones(4, 2)
        model.train_step(x, x, F.mse_loss)
        module[1].is_armed = True
        try:
            model.train_step(x, x, F.mse_loss)
        except PeerError as error:
            (tmp_path / str(shoal.world().rank)).write_text(str(error.rank))
            raise

    with pytest.raises(ArithmeticError, match="no luck"):
        run(train)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "1", "2": "1"}


def test_other_batches_on_one_pipeline_are_told() -> None:
    def train():
        model, _, _ = wrapped()
        x, y = TASKS["gpt"].batch(0, 4 + shoal.world().rank)
        model.train_step(x, y, TASKS["gpt"].loss)

    with pytest.raises(MismatchError, match="same batch"):
        run(train, 2)


def test_values_that_only_some_batches_need_are_refused() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            outputs = [x]
            for block in self.blocks:
                outputs.append(block(outputs[-1]))
            return outputs[1] if x[0, 0] > 0 else outputs[-1]

    def train():
        model = shoal.as_distributed(Fickle(), strategy="pipeline", micro_batches=1)
        with torch.no_grad():
            model(-torch.ones(2, 4))
            model(torch.ones(2, 4))

    with pytest.raises(ShoalError, match=r"blocks\.0 computed on another"):
        run(train, 2)


def test_units_that_write_into_their_arguments_are_refused() -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, seen):
            seen.append(x)
            return self.layer(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Collecting() for _ in range(2))

        def forward(self, x):
            seen: list = []
            for block in self.blocks:
                x = block(x, seen)
            return sum(seen)

    def train():
        model = shoal.as_distributed(Model(), strategy="pipeline")
        model.train_step(torch.ones(2, 2), torch.ones(2, 2), F.mse_loss)

    with pytest.raises(ShoalError, match="writes into its arguments"):
        run(train, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 4}, "zero must be"),
        ({"micro_batches": 0}, "at least one micro-batch"),
        ({"schedule": "fifo"}, "schedule must be"),
        ({"outputs": "nowhere"}, "everywhere"),
        ({"pipeline": 3}, "multiply"),
        ({"cut": ["norm"]}, "cut must name"),
    ],
)
def test_wrong_options(options, message) -> None:
    def wrap():
        with pytest.raises(ValueError, match=message):
            PipelineParallelModel(GPT(layers=4), **options)

    run(wrap, 2)


def test_wrapping_twice() -> None:
    def wrap():
        model, optimizer, _ = wrapped(schedule="gpipe")
        again = shoal.as_distributed(model, optimizer, strategy="pipeline", schedule="gpipe")
        assert again[0] is model
        assert again[1] is optimizer
        with pytest.raises(ValueError, match="wrapped already"):
            shoal.as_distributed(model, strategy="pipeline", schedule="1f1b")
        with pytest.raises(TypeError, match="wrapped already"):
            PipelineParallelModel(model)

    run(wrap, 2)


def test_verify() -> None:
    def build():
        torch.manual_seed(0)
        module = TASKS["gpt"].build()
        batches = [TASKS["gpt"].batch(number, 8) for number in range(2)]
        return module, optimizer_of(module), batches, TASKS["gpt"].loss

    report = shoal.verify(build, strategy="pipeline", ranks=4, data=2, zero=2, steps=2)
    report.raise_if_different()
