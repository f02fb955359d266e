"""The front door: what type checkers find, what tab completion shows, what is refused in words."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaks
import shoal
from shoal import wrapping
from shoal.errors import ShoalError
from shoal.optim import DATA_PARALLEL, PAIRS
from shoal.strategies import DDPModel, TensorParallelModel, option_types
from shoal.strategies.foreign import (
    refuse_foreign_loader,
    refuse_foreign_model,
    refuse_foreign_optimizer,
)
from shoal.strategies.options import options_of

OPTIONS = {
    **dict.fromkeys(DATA_PARALLEL, option_types.DataParallelOptions),
    "tensor": option_types.TensorOptions,
    "pipeline": option_types.PipelineOptions,
    "hybrid": option_types.HybridOptions,
    "local": option_types.LocalOptions,
    "async": option_types.AsyncOptions,
}
ROOT = Path(__file__).parent.parent


def build() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    rows = TensorDataset(torch.ones(8, 5), torch.ones(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, batch_size=4)


def wrap(*args: Any, **options: Any) -> Any:
    return shoal.run(lambda: shoal.as_distributed(*args, **options) and None, 1, "memory")


@pytest.fixture(scope="module", autouse=True)
def torch_is_up() -> None:
    """The first optimizer imports what sets a variable of the environment."""
    build()
    torch.compile(build()[0], backend="eager")
    leaks.baseline()


# Names and types ---------------------------------------------------------------------------


def test_tab_completion_shows_what_was_not_used_yet() -> None:
    code = "import shoal; print(*dir(shoal)); assert 'torch' not in __import__('sys').modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(shoal.__all__) <= set(shown.stdout.split())
    assert hasattr(shoal, "wrapping"), "loaded by now, and nobody's business"
    assert {each for each in dir(shoal) if not each.startswith("__")} < set(shoal.__all__)


def test_types_name_all_strategies() -> None:
    assert set(get_args(option_types.Strategy)) == {*PAIRS, "auto"}
    assert set(get_args(option_types.DataParallelStrategy)) == {*DATA_PARALLEL, "auto"}


@pytest.mark.parametrize("strategy", PAIRS)
def test_types_have_the_options_of_the_constructor(strategy: str) -> None:
    """By name and by type: what is added to one must be added to the other."""
    assert get_type_hints(OPTIONS[strategy]) == options_of(PAIRS[strategy].model)


def test_every_kind_of_use_has_a_type() -> None:
    uses = inspect.getsource(wrapping).count("@overload")
    assert uses == 4 * len(set(map(id, OPTIONS.values())))


RIGHT = """
import shoal, torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from typing import Any

net = nn.Linear(2, 2)
sgd = SGD(net.parameters(), lr=0.1)
loader: DataLoader[Any]

model = shoal.as_distributed(net)
model, optimizer = shoal.as_distributed(net, sgd, strategy="zero3", replica=2)
model, optimizers = shoal.as_distributed(net, [sgd, sgd], strategy="tensor", sequence_parallel=True)
model, optimizer, loader = shoal.as_distributed(net, sgd, loader, strategy="pipeline", chunks=2)
model, loader = shoal.as_distributed(net, loader=loader, strategy="hybrid", tensor=2, zero=1)
model, optimizer = shoal.as_distributed(
    net, sgd, strategy="local", every=20, outer=lambda parameters: SGD(parameters, lr=0.7)
)
loss = model.train_step(1, 2, None)
optimizer.step()
"""
WRONG = {
    'shoal.as_distributed(net, strategy="zero9")': "No overload variant",
    'shoal.as_distributed(net, sgd, strategy="ddp", micro_batches=2)': "No overload variant",
    'shoal.as_distributed(net, sgd, strategy="tensor", schedule="1f1b")': "No overload variant",
    'shoal.as_distributed(net, sgd, strategy="pipeline", sequence_parallel=True)': "No overload",
    'shoal.as_distributed(net, sgd, strategy="zero2", check_every="often")': "No overload variant",
    'shoal.as_distributed(net, sgd, strategy="local", sync_batchnorm=True)': "No overload variant",
    "shoal.as_distributed(sgd, net)": "No overload variant",
    'shoal.as_distributed(net, sgd, find_unused_parameters=True)': "No overload variant",
    'model, optimizer, other = shoal.as_distributed(net, sgd, strategy="ddp")': "Need more than 2",
    'shoal.verify(lambda: 0, strategy="zero9")': "zero9",
    "shoal.as_distribted(net)": "has no attribute",
}  # fmt: skip


def every_option() -> str:
    """A use of each option of each strategy, with a value of its type."""
    values = {"bool": "True", "int": "1", "str": '"a"', "Sequence": '["a"]', "Mapping": "{}"}
    lines = []
    for strategy in PAIRS:
        for name, hint in options_of(PAIRS[strategy].model).items():
            kinds = [getattr(each, "__name__", "") for each in (hint, *get_args(hint))]
            value = next((values[kind] for kind in kinds if kind in values), "None")
            lines.append(f'shoal.as_distributed(net, sgd, strategy="{strategy}", {name}={value})')
    return "\n".join(lines)


@pytest.mark.timeout(300)
def test_mypy_knows_right_uses_from_wrong_ones(tmp_path: Path) -> None:
    """One run for all: each wrong line is found, and no right one."""
    right = textwrap.dedent(RIGHT) + every_option() + "\n"
    script = tmp_path / "script.py"
    script.write_text(right + "\n".join(WRONG) + "\n")
    found = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context",
            f"--cache-dir={tmp_path / 'cache'}", "--follow-imports=silent", str(script),
        ],
        capture_output=True, text=True, env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
    )  # fmt: skip
    errors: dict[int, str] = {}
    for line in found.stdout.splitlines():
        _, number, rest = line.split(":", 2)
        errors[int(number)] = errors.get(int(number), "") + rest
    first = right.count("\n") + 1
    assert set(errors) == set(range(first, first + len(WRONG))), found.stdout + found.stderr
    for number, words in enumerate(WRONG.values(), first):
        assert words in errors[number]


# Arguments in the wrong place --------------------------------------------------------------


def test_swapped_arguments() -> None:
    model, optimizer, loader = build()
    with pytest.raises(TypeError, match=r"in this order: got a SGD for the model.*optimizer="):
        wrap(optimizer, model)
    with pytest.raises(TypeError, match=r"got a DataLoader for the optimizer.*loader="):
        wrap(model, loader, optimizer)
    with pytest.raises(TypeError, match=r"got a SGD for the loader.*optimizer="):
        wrap(model, None, optimizer)


def test_arguments_of_other_kinds() -> None:
    model, optimizer, _ = build()
    with pytest.raises(TypeError, match=r"model must be one torch module, an nn\.Module; got a fu"):
        wrap(build)
    with pytest.raises(TypeError, match=r"model must be one torch module.*got a NoneType"):
        wrap(None)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer.*got a str"):
        wrap(model, "adam")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match="takes no schedulers"):
        wrap(model, scheduler)


def test_nothing_has_happened_by_then() -> None:
    model, optimizer, _ = build()
    with pytest.raises(TypeError):
        wrap(optimizer, model)
    with pytest.raises(TypeError, match="no option 'mesh'"):
        wrap(model, optimizer, strategy="hybrid", mesh=None)
    wrap(model, optimizer)


def test_disabled_means_untouched() -> None:
    model, optimizer, loader = build()
    assert shoal.as_distributed(model, optimizer, loader, enabled=False) == (
        model,
        optimizer,
        loader,
    )


# Options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "option", "words"),
    [
        ("ddp", "micro_batchs", "'ddp' has no option 'micro_batchs': did you mean 'micro_batches'"),
        ("ddp", "micro_batchs", "It is one of 'pipeline', 'hybrid'"),
        ("zero3", "gradient_as_bucket_view", "always lie in the memory"),
        ("ddp", "bucket_cap_mb", "min_group_bytes="),
        ("ddp", "device_ids", "before it is wrapped"),
        ("ddp", "timeout", r"shoal\.init\(timeout"),
        ("ddp", "train_loader", "loader="),
        ("ddp", "lr_scheduler", "needs no wrapping"),
        ("ddp", "world_size", "launch -n 4"),
        ("hybrid", "mesh", "say data=, tensor= and pipeline="),
    ],
)
def test_options_of_others(strategy: str, option: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        wrap(build()[0], strategy=strategy, **{option: 1})


@pytest.mark.parametrize("kind", [DDPModel, TensorParallelModel])
def test_classes_say_the_same(kind: Any) -> None:
    """Also before layers are split, which happens before the constructor of all models."""
    model = build()[0]
    for options, words in (
        ({"find_unused_parameters": True}, f"'{kind.strategy}' has no option 'find_unused_par"),
        ({"check_every": "often"}, "'check_every' must be a whole number"),
    ):
        with pytest.raises(TypeError, match=words):
            shoal.run(lambda options=options: kind(model, **options), 1, "memory")
    assert type(model[0]) is nn.Linear


# Wrappers of other libraries ---------------------------------------------------------------


def of(package: str, name: str, base: type, **attributes: Any) -> Any:
    """An object of a class that another library could have defined."""
    kind = type(name, (base,), {"__module__": f"{package}.somewhere", **attributes})
    return kind.__new__(kind)


DISTRIBUTED_BY_TORCH = """
import shoal, torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module

def say(model):
    try:
        shoal.as_distributed(model, strategy="ddp")
    except TypeError as error:
        print(error)

def build():
    return nn.Sequential(nn.Linear(4, 4))

store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
say(nn.parallel.DistributedDataParallel(build()))
say(fully_shard(build(), mesh=mesh))
say(distribute_module(build(), mesh))
torch.distributed.destroy_process_group()
"""


def test_what_torch_has_distributed() -> None:
    """In a process of its own: torch's groups leave threads behind."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DISTRIBUTED_BY_TORCH],
        capture_output=True, text=True,
    )  # fmt: skip
    wrapped, sharded, split = done.stdout.splitlines() or [done.stderr] * 3
    assert "the model is a torch DistributedDataParallel" in wrapped
    assert "pass the module inside of it (model.module)" in wrapped
    assert "a torch FSDPModule" in sharded
    assert "leave out fully_shard() and choose strategy='fsdp'" in sharded
    assert "the parameter 0.weight is a torch DTensor" in split


def test_wrappers_of_accelerate() -> None:
    model, _, _ = build()
    optimizer = of("accelerate", "AcceleratedOptimizer", torch.optim.Optimizer)
    with pytest.raises(TypeError, match=r"AcceleratedOptimizer.*leave out accelerator\.prepare"):
        wrap(model, optimizer)
    with pytest.raises(TypeError, match=r"AcceleratedOptimizer.*leave out accelerator\.prepare"):
        refuse_foreign_optimizer(optimizer)
    loader = of("accelerate", "DataLoaderShard", DataLoader)
    with pytest.raises(TypeError, match=r"DataLoaderShard.*leave out accelerator\.prepare"):
        refuse_foreign_loader(loader)


def test_a_part_that_is_wrapped() -> None:
    inner = nn.DataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"the model's part 1 is a torch DataParallel"):
        wrap(nn.Sequential(nn.Linear(2, 2), inner))


def test_a_compiled_model_is_none() -> None:
    refuse_foreign_model(torch.compile(build()[0], backend="eager"))


def test_state_cannot_be_replaced() -> None:
    def train() -> None:
        _, optimizer = shoal.as_distributed(*build()[:2])
        optimizer.state = {}

    with pytest.raises(ShoalError, match=r"cannot be replaced: give a whole state"):
        shoal.run(train, 1, "memory")


# Twice ------------------------------------------------------------------------------------------


def build_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def take_step(model: Any, optimizer: Any, number: int, rows: slice) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(inputs[rows]).square().mean().backward()
    optimizer.step()


def train_and_wrap_again(strategy: str, as_list: bool) -> dict[str, torch.Tensor]:
    plain, adam = build_adam()
    given = [adam] if as_list else adam
    model, stepped = shoal.as_distributed(plain, given, strategy=strategy)
    rank = shoal.world().rank
    for number in range(4):
        if number == 2:
            again, also = shoal.as_distributed(model, given, strategy=strategy)
            assert again is model
            assert (also[0] is stepped[0]) if as_list else (also is stepped)
            stepped = also
        optimizer = stepped[0] if as_list else stepped
        take_step(model, optimizer, number, slice(2 * rank, 2 * rank + 2))
    return dict(model.state_dict())


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_wrapping_again_with_the_plain_optimizer_goes_on(strategy: str, as_list: bool) -> None:
    """A second wrapper of it would begin with an empty state."""
    expected, adam = build_adam()
    for number in range(4):
        take_step(expected, adam, number, slice(None))
    for found in shoal.run(train_and_wrap_again, 2, "memory", (strategy, as_list)):
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
