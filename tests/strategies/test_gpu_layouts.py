"""Layers that are split and models that are cut into stages, on a GPU: parity with one process.

Ranks are threads that share the GPU; a few are processes over Gloo, or one rank over NCCL.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

import shoal
from gpus import over_nccl
from shoal.optim import Kind, find_kind
from strategies.models import has_transformers
from strategies.pipeline import training as pipeline
from strategies.pipeline.comparison import assert_same_gradients
from strategies.pipeline.test_parity import MODES, SCHEDULES
from strategies.tensor import training as tensor
from strategies.tensor.layers.test_dropout import check_masks
from strategies.tensor.tasks import HUGGING_FACE
from strategies.test_hybrid import CUBE, TWO_BY_TWO, build, check_clipping_and_accumulation
from strategies.training import STRATEGIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

needs_transformers = pytest.mark.skipif(not has_transformers(), reason="needs transformers")
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tensor": ("tensor", 2, {}),
    "pipeline": ("pipeline", 2, {"micro_batches": 2}),
    "hybrid": ("hybrid", 4, {"zero": 3, "micro_batches": 2, **TWO_BY_TWO}),
}
each_layout = pytest.mark.parametrize("name", LAYOUTS)


@pytest.fixture(autouse=True)
def fixed_order() -> Iterator[None]:
    """Convolutions add in a fixed order, so that ranks can be compared to the bit."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


# Tensor -------------------------------------------------------------------------------------


def tensor_cases() -> Iterator[object]:
    own = (
        "gpt",
        "untied",
        "encoder",
        "translator",
        "mlp",
        "resnet",
        "adapter",
        "unused",
        "twice",
        "direct",
    )
    for task in (*own, *HUGGING_FACE):
        marks = [needs_transformers] if task in HUGGING_FACE else []
        yield pytest.param(tensor.Case(task, 2), id=task, marks=marks)
    for task, ranks, options in (
        ("gpt", 3, {}),
        ("gpt", 4, {"tensor": 2, "zero": 1}),
        ("gpt", 4, {"tensor": 2, "zero": 3}),
        ("encoder", 3, {"sequence_parallel": True}),
    ):
        case = tensor.Case(task, ranks, options)
        yield pytest.param(case, id=str(case))


@pytest.mark.parametrize("case", list(tensor_cases()))
def test_tensor(case: tensor.Case) -> None:
    """AdamW, clipping, and accumulation in every other step."""
    case = dataclasses.replace(case, steps=6, device="cuda")
    results = shoal.run(tensor.train_rank, case.ranks, "memory", args=(case,), timeout=90)
    assert next(iter(results[0][0].values())).is_cuda
    tensor.compare(case, results)


@pytest.mark.parametrize("name", ["own", "encoder", pytest.param("gpt2", marks=needs_transformers)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_of_dropout_are_those_of_one_process(name: str, sequence_parallel: bool) -> None:
    if name == "own" and sequence_parallel:
        pytest.skip("is no stack")
    check_masks(name, sequence_parallel, "cuda")


# Pipeline -----------------------------------------------------------------------------------


def run_pipeline(case: pipeline.Case) -> None:
    case = dataclasses.replace(case, device="cuda")
    results = shoal.run(pipeline.train_rank, case.ranks, "memory", args=(case,), timeout=90)
    assert list(results[0].values())[-1].is_cuda
    pipeline.check(case, results)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
def test_pipeline(schedule: str, mode: str) -> None:
    run_pipeline(pipeline.case("gpt", 2, mode, 6, schedule=schedule, micro_batches=4))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_beside_zero3(schedule: str) -> None:
    options = {"schedule": schedule, "zero": 3, "data": 2, "min_group_bytes": 300}
    run_pipeline(pipeline.case("gpt", 4, "clip", 4, micro_batches=3, **options))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize(
    "task",
    [
        "encoder", "unet", "disorder", "tuples", "normed",
        *(pytest.param(n, marks=needs_transformers) for n in ("llama-tied", "gpt2", "t5", "bert")),
    ],
)  # fmt: skip
def test_models_in_pipelines(task: str, schedule: str) -> None:
    run_pipeline(pipeline.case(task, 2, "accumulate", 4, micro_batches=3, schedule=schedule))


def over_one_world(train: Any, cases: list[Any]) -> list[Any]:
    """By rank and case: what ranks return that train one case after the other over NCCL."""
    ranks, cases = cases[0].ranks, [dataclasses.replace(case, device="cuda") for case in cases]

    def train_all() -> list[Any]:
        return [train(case) for case in cases]

    results = shoal.run(train_all, ranks, "nccl", timeout=60)
    return [(case, list(found)) for case, *found in zip(cases, *results, strict=True)]


@over_nccl(2)
def test_pipelines_over_nccl() -> None:
    options = {"micro_batches": 4}
    cases = [pipeline.case("gpt", 2, "clip", 4, schedule=s, **options) for s in SCHEDULES]
    for case, results in over_one_world(pipeline.train_rank, cases):
        pipeline.check(case, results)


@over_nccl(2)
def test_split_layers_over_nccl() -> None:
    cases = [tensor.Case(task, 2, steps=4) for task in ("gpt", "encoder", "mlp")]
    for case, results in over_one_world(tensor.train_rank, cases):
        tensor.compare(case, results)


@over_nccl(4)
def test_hybrids_over_nccl() -> None:
    options = {"zero": 3, "data": 2, "min_group_bytes": 300, "micro_batches": 3}
    cases = [pipeline.case("gpt", 4, "clip", 4, schedule=s, **options) for s in ("1f1b", "gpipe")]
    for case, results in over_one_world(pipeline.train_rank, cases):
        pipeline.check(case, results)


class Recurrent(nn.Module):
    """Packs sequences: how many there are of each length is on the CPU, the rest on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rnn, self.encoder = (nn.LSTM(4, 4, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[rnn.PackedSequence, Tensor]:
        packed = rnn.pack_padded_sequence(
            self.embedding(x), torch.tensor([1, 3]), batch_first=True, enforce_sorted=False
        )
        packed, _ = self.encoder(self.rnn(packed)[0])
        return packed, self.head(rnn.pad_packed_sequence(packed, batch_first=True)[0])


def recur_in_a_pipeline(cut: str) -> None:
    def loss_fn(output: Any, y: Tensor) -> Tensor:
        return output[0].data.square().mean() + F.mse_loss(output[1], y)

    torch.manual_seed(0)
    module = Recurrent().double().cuda()
    plain = copy.deepcopy(module)
    model = shoal.as_distributed(module, strategy="pipeline", micro_batches=2, cut=[cut])
    x, y = (torch.randn(4, 3, 4, dtype=torch.float64, device="cuda") for _ in range(2))
    for _ in range(2):
        model.train_step(x, y, loss_fn)
        for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
            (loss_fn(plain(inputs), targets) / 2).backward()
    assert_same_gradients(model, plain)
    with torch.no_grad():
        output, expected = model(x[:2]), plain(x[:2])
    torch.testing.assert_close(output, expected)
    assert output[0].batch_sizes.device == expected[0].batch_sizes.device


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("backend", ["memory", "gloo", pytest.param("nccl", marks=over_nccl(2))])
@pytest.mark.parametrize("cut", ["encoder", "head"])
def test_packed_sequences_in_pipelines(cut: str, backend: str) -> None:
    """Their tensors are on two devices, and each stays on its own, between units and at the end."""
    shoal.run(recur_in_a_pipeline, 2, backend, args=(cut,), timeout=60)


class Dropping(nn.Module):
    """Draws on the GPU, and where ``recompute`` is set, draws the same again in backward."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.recompute = recompute

    def _block(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(block(x)), 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(self._block, block, x, use_reentrant=False)
            else:
                x = self._block(block, x)
        return x


def drop_in_a_pipeline() -> tuple[list[float], Tensor]:
    torch.manual_seed(0)
    model = shoal.as_distributed(Dropping().cuda(), strategy="pipeline", micro_batches=2)
    x = torch.randn(8, 6, device="cuda")
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(model.train_step(x, x, F.mse_loss).item())
    return losses, torch.rand(3, device="cuda")


def test_dropout_in_pipelines_repeats_with_its_seed() -> None:
    results = shoal.run(drop_in_a_pipeline, 2, "memory")
    (first, second, again), drawn = results[0]
    assert first == again != second
    for losses, numbers in results:
        assert losses == [first, second, again]
        assert torch.equal(numbers, drawn), "the user's own stream is the same everywhere"


def build_recomputing() -> Any:
    torch.manual_seed(0)
    model = Dropping(recompute=True).double().cuda()
    batches = [(torch.randn(12, 6).double().cuda(), None) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    return model, optimizer, batches, lambda output, _: output.square().mean()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_drawn_again_in_backward_is_the_same(strategy: str) -> None:
    options = {"tolerance": 1e-10, "min_group_bytes": 300}
    report = shoal.verify(build_recomputing, strategy, 3, "memory", 4, "split", **options)
    assert report.equal, str(report)


def test_what_is_drawn_again_in_backward_by_split_layers() -> None:
    report = shoal.verify(build_recomputing, "tensor", 2, "memory", 4, tolerance=1e-10)
    assert report.equal, str(report)


# Hybrid, and all three -----------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("axes", [TWO_BY_TWO, CUBE], ids=["2x2x1", "2x2x2"])
def test_hybrid_clips_and_accumulates(zero: int, axes: dict[str, int]) -> None:
    ranks = axes["tensor"] * axes["pipeline"] * axes["data"]
    check_clipping_and_accumulation(zero, "cuda", axes, ranks)


def build_on_gpu() -> Any:
    return build("cuda")


def build_fused() -> Any:
    model, _, batches, loss_fn = build_on_gpu()
    return model, torch.optim.AdamW(model.parameters(), 0.01, fused=True), batches, loss_fn


def build_capturable() -> Any:
    """Rate and steps are on the GPU."""
    model, _, batches, loss_fn = build_on_gpu()
    rate = torch.tensor(0.01, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), rate, capturable=True)
    return model, optimizer, batches, loss_fn


def build_single_precision() -> Any:
    model, _, batches, loss_fn = build_on_gpu()
    model = model.float()
    return model, torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3), batches, loss_fn


@each_layout
@pytest.mark.parametrize(
    "make", [build_on_gpu, build_fused, build_capturable, build_single_precision]
)
def test_verified(name: str, make: Any) -> None:
    strategy, ranks, options = LAYOUTS[name]
    report = shoal.verify(make, strategy, ranks, "memory", 6, **options)
    assert report.equal, str(report)


@each_layout
@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("nccl", 1)])
def test_processes(name: str, backend: str, ranks: int) -> None:
    strategy, _, options = LAYOUTS[name]
    if strategy == "hybrid":
        options = {**options, "tensor": ranks, "pipeline": 1}
    report = shoal.verify(build_on_gpu, strategy, ranks, backend, 4, **options)
    assert report.equal, str(report)


def devices_of_a_model_from_meta(strategy: str) -> set[str]:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model = shoal.as_distributed(module, strategy=strategy)
    x = torch.ones(4, 4, device="cuda")
    model.train_step(x, x, F.mse_loss)
    return {value.device.type for value in model.state_dict().values()}


@pytest.mark.parametrize("strategy", [*STRATEGIES, "tensor", "pipeline", "hybrid"])
def test_models_from_the_meta_device_go_where_the_backend_is(strategy: str) -> None:
    assert shoal.run(devices_of_a_model_from_meta, 1, "nccl", args=(strategy,)) == [{"cuda"}]


def test_capturable_optimizers_are_divided() -> None:
    """They refuse the CPU, where they are tried."""
    parameters = [nn.Parameter(torch.zeros(3, device="cuda"))]
    rate = torch.tensor(0.01, device="cuda")
    for made in (
        torch.optim.AdamW(parameters, rate, capturable=True),
        torch.optim.AdamW(parameters, rate, fused=True),
        torch.optim.SGD(parameters, rate, fused=True),
    ):
        assert find_kind(made) is Kind.ELEMENT_WISE


def trained_in_bfloat16(name: str | None) -> list[float]:
    model, optimizer, batches, loss_fn = build_single_precision()
    if name is not None:
        strategy, _, options = LAYOUTS[name]
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy, **options)
    losses = []
    for step, (inputs, targets) in enumerate(batches[:6]):
        with torch.autocast("cuda", torch.bfloat16, enabled=step % 3 != 1):
            if name is None:
                loss = loss_fn(model(inputs), targets)
                loss.backward()
            else:
                loss = model.train_step(inputs, targets, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@each_layout
def test_autocast_around_some_steps(name: str) -> None:
    expected = trained_in_bfloat16(None)
    for losses in shoal.run(trained_in_bfloat16, LAYOUTS[name][1], "memory", args=(name,)):
        assert losses == pytest.approx(expected, rel=0.02)


def predicted(name: str | None) -> Tensor:
    model, _, batches, _ = build_on_gpu()
    if name is not None:
        strategy, _, options = LAYOUTS[name]
        model = shoal.as_distributed(model, strategy=strategy, **options)
    with torch.no_grad():
        return model.eval()(batches[0][0])


@each_layout
def test_predictions(name: str) -> None:
    expected = predicted(None)
    for found in shoal.run(predicted, LAYOUTS[name][1], "memory", args=(name,)):
        assert found.device == expected.device
        torch.testing.assert_close(found, expected)


def wrapped_after_some_steps(name: str | None, fused: bool) -> dict[str, Tensor]:
    model, _, batches, loss_fn = build_on_gpu()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4, fused=fused)
    for step, (inputs, targets) in enumerate(batches[:5]):
        if step == 2 and name is not None:
            strategy, _, options = LAYOUTS[name]
            model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy, **options)
        if isinstance(model, shoal.strategies.ShardedModel):
            model.train_step(inputs, targets, loss_fn)
        else:
            loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@each_layout
@pytest.mark.parametrize("fused", [False, True])
def test_wrapped_after_some_steps(name: str, fused: bool) -> None:
    expected = wrapped_after_some_steps(None, fused)
    args = (name, fused)
    for state in shoal.run(wrapped_after_some_steps, LAYOUTS[name][1], "memory", args=args):
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-9)


def scaled(is_wrapped: bool) -> list[float]:
    """The plain loop, with float16 and a scale."""
    model, optimizer, batches, loss_fn = build_single_precision()
    if is_wrapped:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy="tensor")
    make = shoal.optim.GradScaler if is_wrapped else torch.amp.GradScaler
    scaler = make("cuda", init_scale=2.0**40, growth_interval=2)
    losses = []
    for inputs, targets in batches[:12]:
        with torch.autocast("cuda", torch.float16):
            loss = loss_fn(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, scaler.get_scale() / 2**30]


def test_scaled_gradients_of_split_layers() -> None:
    """The first scales are too large, and steps are skipped until one is not."""
    expected = scaled(False)
    for found in shoal.run(scaled, 2, "memory", args=(True,)):
        assert found == pytest.approx(expected, rel=0.02)


def memory_held(name: str) -> list[int]:
    model, optimizer, batches, loss_fn = build_on_gpu()
    strategy, _, options = LAYOUTS[name]
    model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy, **options)
    held = []
    for step in range(10):
        model.train_step(*batches[step], loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        shoal.world().barrier()
        held.append(torch.cuda.memory_allocated())
    return held


@each_layout
def test_memory_does_not_grow(name: str) -> None:
    for held in shoal.run(memory_held, LAYOUTS[name][1], "memory", args=(name,)):
        assert max(held[3:]) - min(held[3:]) < 100_000
