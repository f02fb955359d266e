"""Finding a plan: which layers of a model can be split over a number of ranks, and how.

[Note: never wrong]
A block is split inside (columns, row, whatever is between them on parts) only if a trial says that
this changes nothing, or the model's own plan says so. Layers of a block that is known by its names
but fails are split each on its own: outputs are joined, inputs are cut. That is right whatever the
module does with them, and costs more communication. Anything else stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from shoal.strategies.tensor.layers.linear import sizes_of
from shoal.strategies.tensor.plan import obstacles
from shoal.strategies.tensor.plan.candidates import (
    Candidate,
    certified,
    find_candidates,
    find_vocabularies,
)
from shoal.strategies.tensor.plan.proposals import (
    Verdict,
    are_hooked,
    describe,
    make_block,
    propose,
    try_proposal,
    untried,
)
from shoal.strategies.tensor.plan.tensor_plan import (
    Cut,
    Layer,
    SplitBlock,
    Style,
    TensorPlan,
    alone,
    describe_rest,
    drop_contradictions,
)
from shoal.strategies.tensor.trial.trial_call import uses_parameters
from shoal.torch_internals.modules import feed_forward

_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def draft(module: nn.Module, num_ranks: int) -> TensorPlan:
    """Finds what can be split; the same on every rank.

    Example:
        >>> print(draft(nn.TransformerEncoderLayer(64, 4), 2))
    """
    return _Draft(module, num_ranks).finish()


class _Draft:
    """A plan in the making."""

    def __init__(self, module: nn.Module, num_ranks: int) -> None:
        self._module, self._num_ranks = module, num_ranks
        self.plan = TensorPlan(num_ranks)
        self._claimed: set[int] = set()
        self._certified = certified(module)
        self._verdicts: dict[str, Verdict | None] = {}
        self._uses: dict[str, bool] = {}

    def finish(self) -> TensorPlan:
        """Everything that is found in the model."""
        if self._num_ranks == 1:
            return self.plan
        for name, part in self._module.named_modules():
            if isinstance(part, nn.MultiheadAttention):
                self._add_attention(name, part)
            elif isinstance(part, _TRANSFORMER_LAYERS) and isinstance(part.linear1, nn.Linear):
                self._consider(Candidate(name, ("linear1",), "linear2"), _FeedForward(part))
            else:
                for candidate in find_candidates(name, part):
                    self._consider(candidate)
        for block in find_vocabularies(
            self._module, self._claimed, self._certified, self._num_ranks
        ):
            reason = obstacles.reason_to_stay_whole(self._module.get_submodule(block.name))
            if obstacles.reads_weight_of(self._module, block.name):
                reason = "its weight is read without calling it"
            if reason is not None:
                self.plan.notes[block.name] = f"stays whole: {reason}"
            else:
                self.plan.blocks.append(block)
        drop_contradictions(self._module, self.plan)
        self.plan.whole = describe_rest(self._module, self.plan)
        return self.plan

    def _add_attention(self, name: str, attention: nn.MultiheadAttention) -> None:
        if not self._are_free([attention, attention.out_proj]):
            return
        self._claim([attention, attention.out_proj])
        reason = obstacles.reason_to_stay_whole(attention)
        if reason is not None:
            self.plan.notes[name] = f"stays whole: {reason}"
        elif type(attention) is not nn.MultiheadAttention or obstacles.has_own_forward(attention):
            self.plan.notes[name] = "stays whole: it is a class of its own"
        elif attention.num_heads < self._num_ranks:
            self.plan.notes[name] = f"stays whole: {attention.num_heads} heads for more ranks"
        else:
            heads = Cut.of(attention.num_heads)
            layer = Layer(name, Style.HEADS, heads)
            self.plan.blocks.append(SplitBlock(name, (layer,), heads=heads))

    def _consider(self, candidate: Candidate, stand_in: nn.Module | None = None) -> None:
        block = self._module.get_submodule(candidate.block)
        layers = [block.get_submodule(path) for path in candidate.paths]
        if not self._are_free(layers):
            return
        if any(
            obstacles.reads_weight_of(self._module, n, candidate.block) for n in candidate.names
        ):
            self.plan.notes[candidate.block] = "stays whole: its layers' weights are read elsewhere"
            return
        is_hooked = are_hooked(candidate, block)
        verdict = None if is_hooked else self._verdict(candidate, block, stand_in)
        inside = [block.get_submodule(path) for path in verdict.finding.inside] if verdict else []
        is_hooked = is_hooked or obstacles.have_hooks(inside)
        if verdict is not None and self._are_free(inside) and not is_hooked:
            self.plan.blocks.append(make_block(candidate, verdict))
            self._claim([*layers, *inside])
        elif candidate.is_named:
            self._add_alone(candidate, block, is_hooked)
            self._claim(layers)
        elif is_hooked or obstacles.have_hooks(obstacles.inner_modules(block)):
            self.plan.notes[candidate.block] = "might be split without the hooks in it"

    def _are_free(self, modules: Sequence[nn.Module]) -> bool:
        return self._claimed.isdisjoint(map(id, modules))

    def _claim(self, modules: Sequence[nn.Module]) -> None:
        """Nothing else is done to modules that are split, or that work on parts of activations."""
        self._claimed.update(map(id, modules))

    def _verdict(
        self, candidate: Candidate, block: nn.Module, stand_in: nn.Module | None
    ) -> Verdict | None:
        """The first proposal that may be carried out; blocks that look alike are tried once."""
        key = f"{candidate.columns} {candidate.row} {describe(block)}"
        if key not in self._verdicts:
            self._verdicts[key] = self._try(candidate, block, stand_in)
        return self._verdicts[key]

    def _try(
        self, candidate: Candidate, block: nn.Module, stand_in: nn.Module | None
    ) -> Verdict | None:
        for proposal in propose(candidate, block):
            if proposal.num_units < self._num_ranks:
                return None
            if candidate.is_certain:
                return Verdict(proposal)
            try:
                verdict = try_proposal(candidate, block, proposal, self._num_ranks, stand_in)
            except TypeError:  # it wants more than one tensor
                # Which modules are in between is not known, so none may have hooks.
                is_free = not obstacles.have_hooks(obstacles.inner_modules(block))
                is_known = proposal.is_plain and is_free and self._is_certified(candidate)
                verdict = untried(candidate, block, proposal) if is_known else None
            if verdict is not None:
                return verdict
        return None

    def _is_certified(self, candidate: Candidate) -> bool:
        *columns, row = (self._certified.get(name) for name in candidate.names)
        return row is Style.ROW and all(style is Style.COLUMN for style in columns)

    def _add_alone(self, candidate: Candidate, block: nn.Module, is_hooked: bool) -> None:
        """See [Note: never wrong]."""
        if self._uses_parameters(candidate, block):
            self.plan.notes[candidate.block] = "stays whole: its code reads its layers' weights"
            return
        added = [
            self._add_layer(name, is_row=path == candidate.row)
            for name, path in zip(candidate.names, candidate.paths, strict=True)
        ]
        if any(added):
            self.plan.notes[candidate.block] = "is computed whole, only its weights are split: " + (
                "hooks in it would get parts of activations"
                if is_hooked
                else "its heads cannot be shared out over the ranks"
                if candidate.may_attend
                else "it does not work on parts of its features"
            )

    def _uses_parameters(self, candidate: Candidate, block: nn.Module) -> bool:
        """Whether anything in a block is known to use the layers' weights itself."""
        paths = candidate.paths
        owners = dict.fromkeys(path.rpartition(".")[0] for path in paths)
        users = [block, *map(block.get_submodule, owners)]
        if any(map(obstacles.reads_weights, users)) or obstacles.have_reading_hooks(block):
            return True
        names = [
            f"{path}.{key}"
            for path in paths
            for key, _ in block.get_submodule(path).named_parameters(recurse=False)
        ]
        key = f"uses {names} {describe(block)}"
        if key not in self._uses:
            self._uses[key] = uses_parameters(block, block.get_submodule(paths[0]), names)
        return self._uses[key]

    def _add_layer(self, name: str, *, is_row: bool) -> bool:
        """Splits a linear layer on its own, if it may be."""
        linear = self._module.get_submodule(name)
        size, reason = sizes_of(linear)[0 if is_row else 1], obstacles.reason_to_stay_whole(linear)
        if size < self._num_ranks:
            reason = f"{size} features for more ranks"
        if reason is not None:
            self.plan.notes[name] = f"stays whole: {reason}"
            return False
        self.plan.blocks.append(alone(name, Style.ROW if is_row else Style.COLUMN, size))
        return True


class _FeedForward(nn.Module):
    """The feed-forward half of torch's transformer layers, to be tried on its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        vars(self).update(_feed=feed_forward(layer))  # not a child: its attention is of no interest
        for name, child in layer.named_children():
            if not isinstance(child, nn.MultiheadAttention):
                self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self._feed(x)  # type: ignore[operator]
        return fed
