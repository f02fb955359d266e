"""Finding a plan: which layers of a model can be split over a number of ranks, and how.

[Note: never wrong]
A block is split inside (columns, row, whatever is between them on parts) only if a trial says that
this changes nothing, or the model's own plan says so. Layers of a block that is known by its names
but fails are split each on its own: outputs are joined, inputs are cut. That is right whatever the
module does with them, and costs more communication. Anything else stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from shoal.strategies.tensor.layers.linear import sizes_of
from shoal.strategies.tensor.plan.candidates import Candidate, certified, find_candidates
from shoal.strategies.tensor.plan.cut import Cut
from shoal.strategies.tensor.plan.proposals import propose
from shoal.strategies.tensor.plan.source_code import (
    has_own_forward,
    reads_weight_of,
    reads_weights,
)
from shoal.strategies.tensor.plan.splits import (
    describe_rest,
    drop_contradictions,
    join_names,
)
from shoal.strategies.tensor.plan.tensor_plan import (
    Layer,
    SplitBlock,
    Style,
    TensorPlan,
)
from shoal.strategies.tensor.plan.verdict import (
    Verdict,
    are_hooked,
    between,
    describe,
    make_block,
    try_proposal,
)
from shoal.strategies.tensor.plan.vocabulary import find_vocabularies
from shoal.strategies.tensor.trial.watching import uses_parameters
from shoal.strategies.tensor.user_hooks import (
    have_hooks,
    have_reading_hooks,
    inner_modules,
    reason_to_stay_whole,
)
from shoal.torch_internals.modules import feed_forward


def draft(module: nn.Module, num_ranks: int) -> TensorPlan:
    """Finds what can be split; the same on every rank.

    Example:
        >>> print(draft(nn.TransformerEncoderLayer(64, 4), 2))
    """
    return Draft(module, num_ranks).finish()


class Draft:
    """A plan in the making."""

    def __init__(self, module: nn.Module, num_ranks: int) -> None:
        """Nothing is split yet."""
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
            elif _is_transformer_layer(part):
                self._add_feed_forward(name, part)
            else:
                for candidate in find_candidates(name, part):
                    self._consider(candidate)
        certain, taken = self._certified, self._claimed
        for block in find_vocabularies(self._module, taken, certain, self._num_ranks):
            reason = reason_to_stay_whole(self._module.get_submodule(block.name))
            if reads_weight_of(self._module, block.name):
                reason = "its weight is read without calling it"
            if reason is not None:
                self.plan.notes[block.name] = f"stays whole: {reason}"
            else:
                self.plan.blocks.append(block)
        drop_contradictions(self._module, self.plan)
        self.plan.whole = describe_rest(self._module, self.plan)
        return self.plan

    # torch's own -------------------------------------------------------------------------

    def _add_attention(self, name: str, attention: nn.MultiheadAttention) -> None:
        if not self._claim([attention, attention.out_proj]):
            return
        reason = reason_to_stay_whole(attention)
        if reason is not None:
            self.plan.notes[name] = f"stays whole: {reason}"
        elif type(attention) is not nn.MultiheadAttention or has_own_forward(attention):
            self.plan.notes[name] = "stays whole: it is a class of its own"
        elif attention.num_heads < self._num_ranks:
            self.plan.notes[name] = f"stays whole: {attention.num_heads} heads for more ranks"
        else:
            heads = Cut.of(attention.num_heads)
            layer = Layer(name, Style.HEADS, heads, block=name)
            self.plan.blocks.append(SplitBlock(name, (layer,), heads=heads))

    def _add_feed_forward(self, name: str, layer: nn.Module) -> None:
        candidate = Candidate(name, ("linear1",), "linear2")
        self._consider(candidate, FeedForward(layer))

    # Candidates --------------------------------------------------------------------------

    def _consider(self, candidate: Candidate, stand_in: nn.Module | None = None) -> None:
        block = self._module.get_submodule(candidate.block)
        layers = [block.get_submodule(path) for path in (*candidate.columns, candidate.row)]
        if not self._are_free(layers):
            return
        names = [join_names(candidate.block, path) for path in (*candidate.columns, candidate.row)]
        if any(reads_weight_of(self._module, name, candidate.block) for name in names):
            self.plan.notes[candidate.block] = "stays whole: its layers' weights are read elsewhere"
            return
        is_hooked = are_hooked(candidate, block)
        verdict = None if is_hooked else self._verdict(candidate, block, stand_in)
        inside = [block.get_submodule(path) for path in verdict.inside] if verdict else []
        is_hooked = is_hooked or have_hooks(inside)
        if verdict is not None and self._are_free(inside) and not is_hooked:
            self.plan.blocks.append(make_block(candidate, verdict))
            self._claim([*layers, *inside])
        elif candidate.is_named:
            self._add_alone(candidate, block, is_hooked)
            self._claim(layers)
        elif is_hooked or have_hooks(inner_modules(block)):
            self.plan.notes[candidate.block] = "might be split without the hooks in it"

    def _are_free(self, modules: Sequence[nn.Module]) -> bool:
        return self._claimed.isdisjoint(map(id, modules))

    def _claim(self, modules: Sequence[nn.Module]) -> bool:
        """Nothing else is done to modules that are split, or that work on parts of activations."""
        if not self._are_free(modules):
            return False
        self._claimed.update(map(id, modules))
        return True

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
                is_free = not have_hooks(inner_modules(block))
                is_known = proposal.is_plain and is_free and self._is_certified(candidate)
                verdict = Verdict(proposal, between(block, candidate)) if is_known else None
            if verdict is not None:
                return verdict
        return None

    def _is_certified(self, candidate: Candidate) -> bool:
        styles = dict.fromkeys(candidate.columns, Style.COLUMN) | {candidate.row: Style.ROW}
        return all(
            self._certified.get(join_names(candidate.block, path)) is style
            for path, style in styles.items()
        )

    def _add_alone(self, candidate: Candidate, block: nn.Module, is_hooked: bool) -> None:
        """See [Note: never wrong]."""
        if self._uses_parameters(candidate, block):
            self.plan.notes[candidate.block] = "stays whole: its code reads its layers' weights"
            return
        alone = [
            self._add_layer(join_names(candidate.block, path), is_row=path == candidate.row)
            for path in (*candidate.columns, candidate.row)
        ]
        if any(alone):
            self.plan.notes[candidate.block] = "is computed whole, only its weights are split: " + (
                "hooks in it would get parts of activations"
                if is_hooked
                else "its heads cannot be shared out over the ranks"
                if candidate.may_attend
                else "it does not work on parts of its features"
            )

    def _uses_parameters(self, candidate: Candidate, block: nn.Module) -> bool:
        """Whether anything in a block is known to use the layers' weights itself."""
        if any(map(reads_weights, _users(block, candidate))) or have_reading_hooks(block):
            return True
        paths = (*candidate.columns, candidate.row)
        names = [f"{p}.{key}" for p in paths for key, _ in _own_parameters(block.get_submodule(p))]
        key = f"uses {names} {describe(block)}"
        if key not in self._uses:
            self._uses[key] = uses_parameters(block, block.get_submodule(paths[0]), names)
        return self._uses[key]

    def _add_layer(self, name: str, *, is_row: bool) -> bool:
        """Splits a linear layer on its own, if it may be."""
        linear = self._module.get_submodule(name)
        size, reason = sizes_of(linear)[0 if is_row else 1], reason_to_stay_whole(linear)
        if size < self._num_ranks:
            reason = f"{size} features for more ranks"
        if reason is not None:
            self.plan.notes[name] = f"stays whole: {reason}"
            return False
        style = Style.ROW if is_row else Style.COLUMN
        layer = Layer(name, style, Cut.of(size), is_alone=True, block=name)
        self.plan.blocks.append(SplitBlock(name, (layer,)))
        return True


class FeedForward(nn.Module):
    """The feed-forward half of torch's transformer layers, to be tried on its own."""

    def __init__(self, layer: nn.Module) -> None:
        """Shares the layer's modules."""
        super().__init__()
        vars(self).update(_feed=feed_forward(layer))  # not a child: its attention is of no interest
        for name, child in layer.named_children():
            if not isinstance(child, nn.MultiheadAttention):
                self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        """As the layer does it."""
        fed: Tensor = self._feed(x)  # type: ignore[operator]
        return fed


def _own_parameters(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return layer.named_parameters(recurse=False)


def _users(block: nn.Module, candidate: Candidate) -> list[nn.Module]:
    """The modules whose code has the layers at hand."""
    paths = [path.rpartition(".")[0] for path in (*candidate.columns, candidate.row)]
    return [block, *(block.get_submodule(path) for path in dict.fromkeys(paths))]


def _is_transformer_layer(module: nn.Module) -> bool:
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return isinstance(module, kinds) and isinstance(module.linear1, nn.Linear)
