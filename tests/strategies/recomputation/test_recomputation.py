"""Blocks that are computed again in backward: nothing changes but the memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from pools import Team
from shoal.activations import Policy
from shoal.errors import PeerError
from shoal.strategies.recomputation.blocks import find_blocks
from strategies.models import GPT, TASKS, has_transformers, part
from strategies.recomputation.recomputed import (
    FOUR,
    VOCABULARY,
    WIDTH,
    DropBlock,
    DropNet,
    assert_equal_states,
    compare,
    seed_all,
    text_loss,
    train,
)

policies = pytest.mark.parametrize("policy", ["full", "selective"])
mostly_full = pytest.mark.parametrize(
    "policy", ["full", pytest.param("selective", marks=pytest.mark.full)]
)
mostly_selective = pytest.mark.parametrize(
    "policy", [pytest.param("full", marks=pytest.mark.full), "selective"]
)


@policies
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_data_parallel(strategy: str, policy: str) -> None:
    assert compare(FOUR, "drop", strategy, policy) == (4, 8)


def train_apart(strategy: str, activations: Any) -> Any:
    """Ranks that take turns, so that "async" gives the same each time, too."""
    world = shoal.world()
    seed_all(0)
    module = DropNet()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy=strategy, activations=activations
    )
    for step in range(3):
        seed_all(step + 10 * world.rank)
        tokens = torch.randint(0, VOCABULARY, (4, 7))
        model.train_step(tokens[:, :-1], tokens[:, 1:], text_loss)
        optimizer.step()
        optimizer.zero_grad()
    world.barrier()
    return model.state_dict(), None


@pytest.mark.parametrize("strategy", ["local", "async"])
def test_ranks_that_train_apart(strategy: str) -> None:
    plain, full = (
        shoal.run(train_apart, 2, "memory", args=(strategy, each)) for each in (None, "full")
    )
    assert_equal_states(full, plain)


@mostly_full
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.full)])
def test_processes(backend: str, strategy: str, policy: str) -> None:
    assert compare(Team(backend, 3), "drop", strategy, policy) == (4, 8)


@pytest.mark.parametrize("policy", ["full", "selective", "partition"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("drop", {}), ("gpt", {"tensor": 2, "zero": 3})],
)
def test_tensor(kind: str, options: dict[str, Any], policy: str) -> None:
    compare(FOUR, kind, "tensor", policy, **options)


@mostly_full
@pytest.mark.parametrize(
    ("kind", "options", "times"),
    [
        ("drop", {"schedule": "gpipe"}, 2),
        ("drop", {"schedule": "1f1b"}, 2),
        ("drop", {"schedule": "interleaved", "pipeline": 2}, 2),
        # On the first stage, whose backward has one half only.
        ("drop", {"schedule": "zero-bubble"}, 2),
        ("gpt", {"zero": 3, "pipeline": 2}, None),
    ],
)
def test_pipeline(kind: str, options: dict[str, Any], times: int | None, policy: str) -> None:
    plain, again = compare(FOUR, kind, "pipeline", policy, **options)
    assert times is None or again == times * plain


def test_halves_of_a_backward() -> None:
    """Each computes a block again once, however many weights the block has."""
    options = {"schedule": "zero-bubble"}
    plain = FOUR.run(train, "drop", "pipeline", options)
    again = FOUR.run(train, "drop", "pipeline", options | {"activations": "full"})
    assert [each[1] for each in again] == [
        times * each[1] for times, each in zip((2, 3, 3, 3), plain, strict=True)
    ]


@mostly_selective
@pytest.mark.parametrize(
    "options", [{"tensor": 2, "pipeline": 2}, {"data": 2, "pipeline": 2, "zero": 3}]
)
def test_hybrid(options: dict[str, Any], policy: str) -> None:
    compare(FOUR, "drop", "hybrid", policy, **options)


# Other models -----------------------------------------------------------------------------------


def train_task(name: str, strategy: str, activations: Any) -> tuple[dict[str, Tensor], Any]:
    task, world = TASKS[name], shoal.world()
    torch.manual_seed(0)
    module = task.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy=strategy, min_group_bytes=300, activations=activations
    )
    gathers = []
    for step in range(4):
        before = calls_of("all_gather")
        batch = part(task.batch(step, 4 * world.size), world.rank, world.size)
        task.loss(model, batch).backward()
        gathers.append(calls_of("all_gather") - before)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), gathers


def calls_of(kind: str) -> int:
    counter = shoal.world().stats().get(kind)
    return counter.calls if counter else 0


@mostly_selective
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "encoder_decoder", "experts"])
def test_models(name: str, strategy: str, policy: str) -> None:
    """BatchNorm's statistics are updated once; ranks that use different experts do not wait."""
    plain = shoal.run(train_task, 3, "memory", args=(name, strategy, None))
    again = shoal.run(train_task, 3, "memory", args=(name, strategy, policy))
    assert_equal_states(again, plain)
    # Parameters are gathered once for the second call and backward.
    assert again[0][1][2:] == plain[0][1][2:]


@mostly_full
@pytest.mark.skipif(not has_transformers(), reason="needs transformers")
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "vit"])
def test_hugging_face(name: str, strategy: str, policy: str) -> None:
    plain = shoal.run(train_task, 2, "memory", args=(name, strategy, None))
    assert_equal_states(shoal.run(train_task, 2, "memory", args=(name, strategy, policy)), plain)


def cached_llama() -> tuple[bool, Any]:
    task = TASKS["llama"]
    torch.manual_seed(0)
    module = task.build()
    module.config.use_cache = True
    module.gradient_checkpointing_enable()
    model = shoal.as_distributed(module, strategy="ddp", activations="full")
    task.loss(model, task.batch(0, 4)).backward()
    return module.config.use_cache, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.skipif(not has_transformers(), reason="needs transformers")
def test_beside_hugging_faces_own() -> None:
    """Caches of keys and values are turned off: a block would add its own twice."""
    ((caches, found),) = shoal.run(cached_llama, 1, "memory")
    torch.manual_seed(0)
    module = TASKS["llama"].build()
    TASKS["llama"].loss(module, TASKS["llama"].batch(0, 4)).backward()
    assert not caches
    for name, parameter in module.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


class OwnCheckpoints(DropNet):
    """The user's own, around blocks and inside of them."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def gradients(make: Any, activations: Any, strategy: str = "zero3") -> Any:
    seed_all(0)
    model = shoal.as_distributed(
        make(), strategy=strategy, min_group_bytes=300, activations=activations
    )
    seed_all(1)
    model(torch.arange(12).view(3, 4)).square().mean().backward()
    return dict(model.full_gradients()), None


class Draws(nn.Module):
    """What it draws is in what autograd saves: with other draws the gradients are others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.random() + float(np.random.random())
        return torch.tanh(self.norm(self.linear(x.float())) * drawn)


@policies
def test_draws_of_python_and_numpy(policy: str) -> None:
    make = lambda: nn.Sequential(*(Draws() for _ in range(3)))  # noqa: E731
    plain = shoal.run(gradients, 2, "memory", args=(make, None))
    assert_equal_states(shoal.run(gradients, 2, "memory", args=(make, policy)), plain)


@policies
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_beside_torchs_own(policy: str, use_reentrant: bool) -> None:
    make = lambda: OwnCheckpoints(use_reentrant)  # noqa: E731
    plain = shoal.run(gradients, 2, "memory", args=(make, None))
    assert_equal_states(shoal.run(gradients, 2, "memory", args=(make, policy)), plain)


def in_autocast(activations: Any) -> Any:
    seed_all(0)
    module = DropNet()
    model = shoal.as_distributed(module, strategy="ddp", activations=activations)
    seed_all(1)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.arange(12).view(3, 4))
    output.float().square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}, None


@policies
def test_autocast_is_preserved(policy: str) -> None:
    plain = shoal.run(in_autocast, 2, "memory", args=(None,))
    assert_equal_states(shoal.run(in_autocast, 2, "memory", args=(policy,)), plain)


@policies
def test_mixed_precision(policy: str) -> None:
    compare(FOUR, "drop", "zero3", policy, mixed_precision="bf16")


class Overwriting(nn.Module):
    """The result of a product is overwritten, so it cannot be handed out again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


@policies
def test_operations_in_place(policy: str) -> None:
    plain = shoal.run(gradients, 2, "memory", args=(Overwriting, None))
    assert_equal_states(shoal.run(gradients, 2, "memory", args=(Overwriting, policy)), plain)


class Counter(nn.Module):
    """A block whose result depends on a buffer that it changes, or replaces."""

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.linear, self.replaces = nn.Linear(WIDTH, WIDTH), replaces
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) * self.count)
        if self.replaces:
            self.count = self.count + 1
        else:
            self.count.add_(1)
        return y


class Counting(Overwriting):
    def __init__(self, replaces: bool) -> None:
        super().__init__()
        block = Counter(replaces=replaces)
        self.blocks = nn.ModuleList([nn.Sequential(block, nn.Tanh())])
        self.twice = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = self.blocks[0](x)
        return x


def count(replaces: bool, activations: Any) -> Any:
    found, _ = gradients(lambda: Counting(replaces), activations, "ddp")
    return found, None


@policies
@pytest.mark.parametrize("replaces", [False, True])
def test_buffers_that_a_block_changes(policy: str, replaces: bool) -> None:
    if not replaces:  # autograd itself refuses: the second call writes to what the first saved
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            shoal.run(count, 1, "memory", args=(replaces, None))
        return
    plain = shoal.run(count, 1, "memory", args=(replaces, None))
    assert_equal_states(shoal.run(count, 1, "memory", args=(replaces, policy)), plain)


def step_between(strategy: str, policy: str) -> str:
    """Two forwards, then a step from the first: the second cannot be computed again."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy=strategy, min_group_bytes=0, activations=policy
    )
    first, second = (model(torch.ones(2, 4)).sum() for _ in range(2))
    first.backward()
    optimizer.step()
    try:
        second.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@policies
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_new_values_before_backward(backend: str, strategy: str, policy: str) -> None:
    for text in Team(backend, 2).run(step_between, strategy, policy):
        assert "backward needs the parameters of '2' as they were in forward" in text


def compiled(activations: Any) -> Any:
    seed_all(0)
    module = GPT(layers=2)
    for block in module.blocks:
        block.compile(backend="eager")
    model = shoal.as_distributed(module, strategy="ddp", activations=activations)
    model(torch.arange(12).view(3, 4)).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}, None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks() -> None:
    plain = shoal.run(compiled, 1, "memory", args=(None,))
    assert_equal_states(shoal.run(compiled, 1, "memory", args=("full",)), plain)
    with pytest.raises(ValueError, match="was compiled"):
        shoal.run(compiled, 1, "memory", args=("selective",))


# What is dropped --------------------------------------------------------------------------------


def kept_bytes(activations: Any) -> tuple[int, int]:
    """What torch has allocated in a forward and not freed at its end, without the output.

    And the same as shoal counts it, without the model's input.
    """
    torch.manual_seed(0)
    module = nn.Sequential(*(DropBlock(64) for _ in range(6)))
    model = shoal.as_distributed(module, strategy="ddp", activations=activations)
    x = torch.randn(128, 64, requires_grad=True)
    model(x).sum().backward()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        output = model(x)
    used = sum(event.self_cpu_memory_usage for event in profile.events())
    counted = shoal.world().stats().memory.get("activations")
    return used - output.nbytes, counted.current - x.nbytes if counted else 0


def test_memory_is_saved() -> None:
    runs = [shoal.run(kept_bytes, 1, "memory", args=(p,)) for p in (None, "full", "selective")]
    plain, full, selective = (held for ((held, _),) in runs)
    inputs = 5 * 128 * 64 * 4  # of all blocks but the first
    products = 6 * 128 * (2 * 64 + 64) * 4
    assert inputs <= full < 1.1 * inputs + 6 * 8192  # and the states of random generators
    assert full + products <= selective < 0.75 * plain
    assert full < 0.2 * plain
    for ((held, counted),) in runs[1:]:
        # Besides, the states of random generators, and elements of results that are compared.
        assert counted <= held < counted + 6 * 10_000


def counted_bytes(policy: str) -> list[int]:
    module = nn.Sequential(*(DropBlock(64) for _ in range(3)))
    model = shoal.as_distributed(module, strategy="ddp", activations=policy)
    memory = lambda: shoal.world().stats().memory["activations"]  # noqa: E731
    x = torch.randn(128, 64)
    output = model(x)
    held = memory().current
    output.sum().backward()
    after = memory().current
    del output
    model(x)  # never differentiated, and let go of at once
    return [held, after, memory().current, memory().peak]


def test_kept_memory_is_counted() -> None:
    inputs, products = 128 * 64 * 4, 128 * 3 * 64 * 4
    for policy, each in (("full", inputs), ("selective", inputs + products)):
        (found,) = shoal.run(counted_bytes, 1, "memory", args=(policy,))
        assert found == [3 * each, 0, 0, 3 * each]


PLACES = {"partition": ("tensor", 2), "peer": ("pipeline", 4)}
"""Strategy and ranks, for policies that go with one strategy only."""


@pytest.mark.parametrize("policy", ["full", "selective", "offload", "auto", "partition", "peer"])
@pytest.mark.skipif(not has_transformers(), reason="needs transformers")
@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "llama",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("gpt2", "t5", "bert", "vit")),
    ],
)
def test_verify(name: str, policy: str) -> None:
    def build() -> Any:
        task = TASKS[name]
        model = GPT(layers=4) if name == "gpt" else task.build()  # one for each stage
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [(task.batch(step, 4), torch.zeros(4)) for step in range(3)]
        if name == "gpt":
            batches = [(batch["tokens"][:, :-1], batch["tokens"][:, 1:]) for batch, _ in batches]
            return model, optimizer, batches, text_loss
        return model, optimizer, batches, lambda output, _: output.loss

    tolerance = None if name == "gpt" else 1e-5
    strategy, ranks = PLACES.get(policy, ("zero3", 4))
    options: dict[str, Any] = {"memory": "1GB"} if policy == "auto" else {}
    report = shoal.verify(
        build,
        strategy,
        ranks=ranks,
        steps=3,
        tolerance=tolerance,
        min_group_bytes=300,
        activations=policy,
        **options,
    )
    report.raise_if_different()


@pytest.mark.skipif(not has_transformers(), reason="needs transformers")
@pytest.mark.parametrize(
    ("strategy", "policy", "options"),
    [
        ("pipeline", "full", {"pipeline": 2, "schedule": "zero-bubble"}),
        pytest.param("pipeline", "selective", {"pipeline": 2}, marks=pytest.mark.full),
        pytest.param("hybrid", "partition", {"tensor": 2}, marks=pytest.mark.full),
    ],
)
def test_blocks_with_lists_in_them(strategy: str, policy: str, options: dict[str, Any]) -> None:
    """T5's consist of a list, which a pipeline cuts: its members are computed again instead."""

    def build() -> Any:
        task = TASKS["t5"]
        model = task.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [(task.batch(step, 4), torch.zeros(4)) for step in range(2)]
        return model, optimizer, batches, lambda output, _: output.loss

    def describe() -> str:
        return shoal.as_distributed(
            TASKS["t5"].build(), strategy=strategy, activations=policy, **options
        ).describe()

    report = shoal.verify(
        build, strategy, steps=2, tolerance=1e-5, ranks=2, activations=policy, **options
    )
    report.raise_if_different()
    text = shoal.run(describe, 2, "memory")[0]
    assert "(encoder.block.0.layer.0 to decoder.block.0.layer.2)" in text


# Which blocks -----------------------------------------------------------------------------------


def make_blocks(*shape: int) -> nn.Module:
    if not shape:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return nn.Sequential(*(make_blocks(*shape[1:]) for _ in range(shape[0])))


class Compiled(nn.Module):
    """What `torch.compile(module)` gives, as far as it is looked at."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_blocks_are_members_of_lists() -> None:
    assert list(find_blocks(GPT(layers=3), Policy())) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(find_blocks(make_blocks(2), Policy())) == ["0", "1"]
    assert list(find_blocks(make_blocks(2, 2), Policy())) == ["0.0", "0.1", "1.0", "1.1"]
    compiled = nn.ModuleList(map(Compiled, [make_blocks(), nn.Linear(2, 2)]))
    assert list(find_blocks(compiled, Policy())) == ["0"]
    shared = make_blocks()
    assert list(find_blocks(nn.ModuleList([shared, shared]), Policy())) == ["0"]


def test_named_blocks() -> None:
    model = GPT(layers=3)
    named = lambda *names: list(find_blocks(model, Policy(blocks=names)))  # noqa: E731
    assert named("blocks.1") == ["blocks.1"]
    assert named("blocks.*") == ["blocks.0", "blocks.1", "blocks.2"]
    assert named("blocks.*.mlp", "blocks.0.attention") == [
        "blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp", "blocks.0.attention",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("activations", "message"),
    [
        ("some", "activations must be 'full', 'selective', .* or 'auto'; got 'some'"),
        ("partition", 'use it with strategy="tensor"'),
        ("auto", "say memory="),
        (Policy(blocks=["nothing"]), "no part of the model is called 'nothing'; there are 0, 0.0"),
        (Policy(blocks=["0", "0.1"]), "block '0.1' is inside of block '0'"),
    ],
)
def test_wrong_values(activations: Any, message: str) -> None:
    def wrap() -> None:
        shoal.as_distributed(make_blocks(2), activations=activations)

    with pytest.raises(ValueError, match=message):
        shoal.run(wrap, 1, "memory")


def test_a_model_without_blocks() -> None:
    def wrap() -> None:
        shoal.as_distributed(nn.Linear(2, 2), activations="full")

    with pytest.raises(ValueError, match="no blocks were found in Linear"):
        shoal.run(wrap, 1, "memory")


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="blocks must be a list of names; got the string 'a'"):
        Policy(blocks="a")

    def wrap() -> None:
        shoal.as_distributed(make_blocks(2), activations=True)

    with pytest.raises(TypeError, match="option 'activations' must be"):
        shoal.run(wrap, 1, "memory")


def test_description_and_wrapping_again() -> None:
    def wrap() -> str:
        model = shoal.as_distributed(make_blocks(2), strategy="ddp", activations="full")
        assert shoal.as_distributed(model, strategy="ddp", activations="full") is model
        with pytest.raises(ValueError, match="wrapped already"):
            shoal.as_distributed(model, strategy="ddp", activations="selective")
        return model.describe()

    (text,) = shoal.run(wrap, 1, "memory")
    assert "activations of 2 blocks (0 to 1): everything is computed again in backward" in text


def test_options_of_other_libraries() -> None:
    def wrap() -> None:
        shoal.as_distributed(make_blocks(2), gradient_checkpointing=True)

    with pytest.raises((TypeError, PeerError), match='say activations="full"'):
        shoal.run(wrap, 1, "memory")
