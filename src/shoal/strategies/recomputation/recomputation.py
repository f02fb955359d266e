"""Blocks that keep no activations: backward computes them again.

[Note: recomputed blocks]
A block's call goes through torch's own activation checkpointing (without reentrant autograd), hooks
included, so what the strategies hang on modules works in both calls. Torch restores its random
generators and autocast; we restore what else the second call must find as the first did: numpy's
and Python's generators, and buffers that the block changes, which are then put back. So statistics
are updated once. A parameter that has new values by then is an error. So is a block whose second
call gives something else, which is looked at now and then: it goes by what nobody restores, as a
counter or a generator of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.strategies.consistency.drift import is_due
from shoal.strategies.engine.admission import is_transforming
from shoal.strategies.recomputation.automatic import Automatic, BlockTrial
from shoal.strategies.recomputation.blocks import find_blocks
from shoal.strategies.recomputation.kept_memory import KeptMemory
from shoal.strategies.recomputation.kept_products import KeepingProducts, ReusingProducts
from shoal.strategies.recomputation.policy import Policy
from shoal.strategies.recomputation.replay import BlockReplay
from shoal.strategies.recomputation.same_result import SameResult
from shoal.strategies.recomputation.stores.store import Moved, Moving, Store, own_storages
from shoal.torch_internals.modules import CALL, COMPILED_CALL, compiled_call
from shoal.torch_internals.trees import tree_flatten, tree_unflatten

_IN_WORDS = {
    "none": "everything is kept",
    "full": "everything is computed again in backward",
    "selective": "all but products with weights and fused attention is computed again in backward",
}


class Recomputation:
    """The blocks of one model that are computed again; see [Note: recomputed blocks]."""

    def __init__(
        self, model: nn.Module, policy: Policy, store: Store, automatic: Automatic | None = None
    ) -> None:
        """Changes how the model's blocks are called.

        Args:
            model: Whose blocks these are.
            policy: What is dropped, and in which blocks.
            store: Where what they keep lies.
            automatic: Chooses what is dropped, if the policy does not say.
        """
        self.policy, self.blocks, self.store = policy, find_blocks(model, policy), store
        self.automatic, self._model = automatic, model
        self._own: Collection[int] = ()
        self.generation: Callable[[Iterable[Tensor]], object] = lambda _: None
        """Something that differs once some parameters have new values."""
        self.check_every = 0
        """In every how many-th call of a block the results of both calls are compared."""
        self._num_calls: Counter[str] = Counter()
        self.memory: KeptMemory | None = None
        """Where what blocks keep is counted."""
        self.stops_early = True
        """Whether a second call ends as soon as backward has what it needs."""
        for name, block in self.blocks.items():
            self._intercept(name, block)

    def begin_forward(self) -> None:
        """Before the model is called in training: looks where its parameters lie."""
        if self.automatic is not None or self.policy.recompute == "none":
            self._own = own_storages(self._model)
        if self.automatic is not None:
            self.automatic.own = self._own
            self.automatic.begin_forward()

    def describe(self) -> str:
        """One line."""
        names = list(self.blocks)
        shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        blocks = "1 block" if len(names) == 1 else f"{len(names)} blocks"
        chosen = self.automatic and self.automatic.describe()
        what = chosen or f"{_IN_WORDS[self.policy.recompute]}{self.store.describe()}"
        return f"activations of {blocks} ({shown}): {what}"

    def _intercept(self, name: str, block: nn.Module) -> None:
        is_compiled = compiled_call(block) is not None
        if is_compiled and self.policy.recompute == "selective":
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
            way = self.policy.recompute
            if self.automatic is not None:
                way = self.automatic.way_of(
                    BlockTrial(name, block, forward, (args, kwargs), self._own)
                )
            if way == "none":
                return self._call_once(name, forward, args, kwargs)
            return self._call_twice(name, block, forward, args, kwargs, way == "selective")

        setattr(block, attribute, call)

    def _call_once(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.store.moves:
            return forward(*args, **kwargs)
        self.store.begin_call()
        with Moving(self.store, self._own, name):
            return forward(*args, **kwargs)

    def _call_twice(
        self,
        name: str,
        block: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        keeps_products: bool,
    ) -> Any:
        self.store.begin_call()
        inputs = BlockInputs(self.store, name, args, kwargs)
        parameters = [*block.parameters(), *inputs.parameters]
        second = SecondCall(self, name, block, parameters, keeps_products=keeps_products)
        self._num_calls[name] += 1
        is_compared = is_due(self._num_calls[name], self.check_every)
        same_result = SameResult(name) if is_compared else None

        def run(*kept: Any) -> Any:
            again_args, again_kwargs = inputs.take(kept)
            result = forward(*again_args, **again_kwargs)
            if same_result is not None:
                same_result.look(result)
            return result

        output = checkpoint(
            run,
            *inputs.kept,
            *inputs.markers,
            use_reentrant=False,
            early_stop=self.stops_early and not is_compared,
            context_fn=lambda: (second.keeping or contextlib.nullcontext(), second),
        )
        products = []
        if second.keeping is not None:
            second.keeping.move(self.store, name)
            products = second.keeping.results
        if self.memory is not None:
            held = [self.store.held(kept) for kept in (*inputs.kept, *products)]
            self.memory.keep([each for each in held if each is not None], second)
        inputs.forget()
        return output


class BlockInputs:
    """What a block was called with, for its second call.

    Attributes:
        kept: Of each leaf of the arguments what stands for it.
        parameters: Those among the leaves, which stay where they are. Torch is not shown them:
            where they are sharded, it would save memory that is not theirs in backward.
        markers: Tensors without elements, for torch, which restores random states and autocast by
            the devices that it sees.
    """

    def __init__(self, store: Store, name: str, args: Any, kwargs: Any) -> None:
        """What needs no gradient, as masks, is often shared with other blocks and stays here."""
        self._store = store
        self._given: Any = (args, kwargs)
        leaves, self._structure = tree_flatten(self._given)
        self.parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        self.kept = [
            _Given(leaf)
            if isinstance(leaf, nn.Parameter)
            else store.put(leaf, f"{name} {index}")
            if _has_gradient(leaf)
            else leaf
            for index, leaf in enumerate(leaves)
        ]
        pairs = zip(leaves, self.kept, strict=True)
        devices = {leaf.device for leaf, kept in pairs if isinstance(kept, Moved)}
        self.markers = [torch.empty(0, device=device) for device in devices]

    def take(self, kept: Sequence[Any]) -> Any:
        """Positional and keyword arguments: those that were given, later equal ones."""
        given, self._given = self._given, None
        if given is not None:
            return given
        leaves = [self._back(each) for each in kept[: len(self.kept)]]
        return tree_unflatten(leaves, self._structure)

    def _back(self, kept: Any) -> Any:
        if isinstance(kept, Moved):
            return self._store.get(kept).requires_grad_()
        return kept.parameter if isinstance(kept, _Given) else kept

    def forget(self) -> None:
        """Torch has what is kept; an error in forward may have left the arguments here."""
        self._given, self.kept = None, [None] * len(self.kept)


class _Given(NamedTuple):
    """What stands for a parameter among the arguments."""

    parameter: nn.Parameter


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class SecondCall:
    """The context of a block's second call; it is entered once for each backward."""

    def __init__(
        self,
        recomputation: Recomputation,
        name: str,
        block: nn.Module,
        parameters: Sequence[Tensor],
        *,
        keeps_products: bool,
    ) -> None:
        """Before the first call; ``parameters`` are those that it computes with."""
        self._recomputation, self._name, self._parameters = recomputation, name, parameters
        self._before = BlockReplay(block)
        self._generation = self._state_of_parameters()
        self.keeping = KeepingProducts() if keeps_products else None
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = self._again()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)

    def _state_of_parameters(self) -> object:
        wants = [each.requires_grad for each in self._parameters]
        return self._recomputation.generation(self._parameters), wants

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        if self._state_of_parameters() != self._generation:
            raise RuntimeError(
                f"backward needs the parameters of {self._name!r} as they were in forward, to "
                "compute its activations again, but they were changed since, by an optimizer's "
                "step, by hand or by requires_grad_(): run forward again before this backward"
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
