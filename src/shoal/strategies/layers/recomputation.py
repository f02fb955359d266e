"""Blocks that keep no activations: backward computes them again.

[Note: recomputed blocks]
A block's call goes through torch's own activation checkpointing (without reentrant autograd), hooks
included, so what the strategies hang on modules works in both calls. Torch restores its random
generators and autocast; we restore what else the second call must find as the first did: numpy's
and Python's generators, and buffers that the block changes, which are then put back. So statistics
are updated once. A parameter that has new values by then is an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.strategies.engine.admission import is_transforming
from shoal.strategies.layers.kept_memory import KeptMemory
from shoal.strategies.layers.kept_products import KeepingProducts, ReusingProducts
from shoal.strategies.layers.replay import BlockReplay
from shoal.torch_internals.modules import CALL, COMPILED_CALL, compiled_call
from shoal.torch_internals.trees import tree_leaves

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
RECOMPUTE = ("full", "selective")


@dataclass(frozen=True)
class Policy:
    """Which activations are dropped in forward and computed again in backward.

    Attributes:
        recompute: "full": a block keeps its inputs only; "selective": it also keeps the results of
            matrix products and convolutions with weights, and computes the rest again.
        blocks: Names of the blocks, or patterns of names ("layers.*"); by default the members of
            the model's lists of modules.

    Example:
        >>> policy = Policy("selective", blocks=["transformer.h.*"])
        >>> model = shoal.as_distributed(model, strategy="zero3", activations=policy)
    """

    recompute: str = "full"
    blocks: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.recompute not in RECOMPUTE:
            raise ValueError(
                f"activations are recomputed {' or '.join(map(repr, RECOMPUTE))}; "
                f"got {self.recompute!r}"
            )
        if isinstance(self.blocks, str):
            raise TypeError(f"blocks must be a list of names; got the string {self.blocks!r}")
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))


def parse_policy(activations: str | Policy | None) -> Policy | None:
    """What a user wrote for ``activations=``."""
    return Policy(activations) if isinstance(activations, str) else activations


def find_blocks(model: nn.Module, policy: Policy) -> dict[str, nn.Module]:
    """The blocks of a model by name: those that were named, or the members of its lists.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> list(find_blocks(nn.Sequential(block(), block(), nn.Linear(2, 1)), Policy()))
        ['0', '1']
    """
    if policy.blocks is not None:
        return _named_blocks(model, policy.blocks)
    found = {module: name for name, module in _members(model, "")}  # each once
    if not found:
        raise ValueError(
            f"no blocks were found in {type(model).__name__}: its lists of modules have no members "
            "that consist of several layers. Name the blocks whose activations are to be computed "
            'again: activations=shoal.activations.Policy("full", blocks=["encoder", "decoder.*"])'
        )
    return {name: module for module, name in found.items()}


def _members(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The members of a model's lists that consist of several layers, the outermost ones."""
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        inside = list(_members(child, full_name)) if isinstance(child, _LISTS) else []
        if isinstance(module, _LISTS) and not inside and _is_composed(child):
            yield full_name, child
        else:
            yield from inside or _members(child, full_name)


def _is_composed(module: nn.Module) -> bool:
    is_callable = type(module).forward is not nn.Module.forward
    has_weights = any(True for _ in module.parameters())
    return is_callable and has_weights and any(True for _ in module.children())


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = {name: each for name, each in modules.items() if fnmatchcase(name, pattern)}
        # "layers.*" means the layers, not also what is in them.
        depth = min((name.count(".") for name in matches), default=0)
        matches = {name: each for name, each in matches.items() if name.count(".") == depth}
        if not matches:
            some = ", ".join(list(modules)[:8])
            raise ValueError(
                f"activations: no part of the model is called {pattern!r}; there are {some}, ..."
            )
        found |= matches
    for name in found:
        outer = next((each for each in found if name.startswith(f"{each}.")), None)
        if outer is not None:
            raise ValueError(
                f"activations: block {name!r} is inside of block {outer!r}, and would be computed "
                "twice again; name one of them"
            )
    return found


class Recomputation:
    """The blocks of one model that are computed again; see [Note: recomputed blocks]."""

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        """Changes how the model's blocks are called."""
        self.policy, self.blocks = policy, find_blocks(model, policy)
        self.generation: Callable[[nn.Module], object] = lambda _: None
        """Something that differs once a block's parameters have new values."""
        self.memory: KeptMemory | None = None
        """Where what blocks keep is counted."""
        self.stops_early = True
        """Whether a second call ends as soon as backward has what it needs."""
        for name, block in self.blocks.items():
            self._intercept(name, block)

    def describe(self) -> str:
        """One line."""
        names = list(self.blocks)
        shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        what = "all but products with weights" if self.is_selective else "everything"
        blocks = "1 block" if len(names) == 1 else f"{len(names)} blocks"
        return f"activations of {blocks} ({shown}): {what} is computed again in backward"

    @property
    def is_selective(self) -> bool:
        """Whether products are kept."""
        return self.policy.recompute == "selective"

    def _intercept(self, name: str, block: nn.Module) -> None:
        is_compiled = compiled_call(block) is not None
        if is_compiled and self.is_selective:
            raise ValueError(
                f"activations: block {name!r} was compiled, and which of its operations are kept "
                'cannot be chosen from outside. Say activations="full", or do not compile it'
            )
        attribute = COMPILED_CALL if is_compiled else CALL
        given: Callable[..., Any] = getattr(block, attribute)
        is_own = attribute in vars(block)

        @functools.wraps(given)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Looked up now: the module's class may have changed.
            forward = given if is_own else MethodType(getattr(type(block), attribute), block)
            if not torch.is_grad_enabled() or is_transforming() or _recomputes_itself(block):
                return forward(*args, **kwargs)
            second = SecondCall(self, name, block)
            output = checkpoint(
                functools.partial(forward, **kwargs),
                *args,
                use_reentrant=False,
                early_stop=self.stops_early,
                context_fn=lambda: (second.keeping or contextlib.nullcontext(), second),
            )
            if self.memory is not None:
                self.memory.keep(second.kept((args, kwargs)), second)
            return output

        setattr(block, attribute, call)


class SecondCall:
    """The context of a block's second call; it is entered once for each backward."""

    def __init__(self, recomputation: Recomputation, name: str, block: nn.Module) -> None:
        """Before the first call."""
        self._recomputation, self._name, self._block = recomputation, name, block
        self._before = BlockReplay(block)
        self._generation = recomputation.generation(block)
        self.keeping = KeepingProducts() if recomputation.is_selective else None
        self._entered: list[AbstractContextManager[Any]] = []

    def kept(self, inputs: Any) -> list[Tensor]:
        """What is kept, after the first call."""
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        products = [] if self.keeping is None else self.keeping.products
        return [*tensors, *(product.result for product in products)]

    def __enter__(self) -> None:
        context = self._again()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        if self._recomputation.generation(self._block) != self._generation:
            raise RuntimeError(
                f"backward needs the parameters of {self._name!r} as they were in forward, to "
                "compute its activations again, but they were changed since, by an optimizer's "
                "step or by hand: run forward again before this backward"
            )
        reusing = (
            contextlib.nullcontext() if self.keeping is None else ReusingProducts(self.keeping)
        )
        with self._before.restored(self._name), reusing:
            yield


def _recomputes_itself(block: nn.Module) -> bool:
    """Whether it is one of Hugging Face's after `gradient_checkpointing_enable()`."""
    return bool(getattr(block, "gradient_checkpointing", False)) and block.training


def stop_caching(module: nn.Module) -> None:
    """Hugging Face models cache all layers' keys and values in one object.

    No rank of a pipeline has them all, and a block that is computed again would add its own twice.
    """
    config: Any = getattr(module, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
