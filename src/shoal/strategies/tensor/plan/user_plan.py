"""A plan that a user describes: names of layers, with stars, and how to split them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from shoal.strategies.tensor.layers.linear import is_linear, sizes_of
from shoal.strategies.tensor.layers.vocabulary import may_split_rows
from shoal.strategies.tensor.plan import obstacles
from shoal.strategies.tensor.plan.candidates import Candidate
from shoal.strategies.tensor.plan.draft import draft
from shoal.strategies.tensor.plan.proposals import Proposal, make_block, try_proposal, untried
from shoal.strategies.tensor.plan.tensor_plan import (
    Layer,
    SplitBlock,
    Style,
    TensorPlan,
    alone,
    describe_rest,
    find_contradiction,
    parse_style,
)
from shoal.strategies.tensor.trial.trial_call import uses_parameters


def make_plan(
    module: nn.Module, num_ranks: int, wanted: Mapping[str, str] | TensorPlan | None
) -> TensorPlan:
    """The plan that a user has, describes, or leaves to be found."""
    if wanted is None:
        return draft(module, num_ranks)
    if not isinstance(wanted, TensorPlan):
        return plan_from_patterns(module, num_ranks, wanted)
    if wanted.num_ranks != num_ranks:
        raise ValueError(f"the plan is for {wanted.num_ranks} ranks; got {num_ranks}")
    return wanted


def plan_from_patterns(
    module: nn.Module, num_ranks: int, patterns: Mapping[str, str]
) -> TensorPlan:
    """A plan with exactly the layers that fit the patterns.

    A block that would be found by itself is split as that would be. Other columns and rows of one
    module belong together if their sizes fit; what is between them is tried, if it can be called
    with one tensor, and trusted to work on parts if it cannot.

    Raises:
        ValueError: If a pattern fits nothing, a style is unknown or does not go with a layer, or
            what is between a column and its row does not work on parts.

    Example:
        >>> plan = plan_from_patterns(model, 2, {"layers.*.fc1": "column", "layers.*.fc2": "row"})
    """
    styles = _styles(module, patterns)
    plan = TensorPlan(num_ranks)
    if num_ranks == 1:
        return plan
    for block in draft(module, num_ranks).blocks:
        if all(styles.get(x.name) is x.style or _is_table(module, x) for x in block.layers):
            plan.blocks.append(block)
            for layer in block.layers:
                styles.pop(layer.name, None)
    for candidate in _pairs(module, styles):
        plan.blocks.append(_checked(module, candidate, num_ranks))
        for name in candidate.names:
            styles.pop(name)
    plan.blocks += [_alone(module, name, style, num_ranks) for name, style in styles.items()]
    odd = find_contradiction(module, plan)
    if odd is not None:
        raise ValueError(
            f"{odd[1]} is shared with a layer that the plan splits in another way, or not at all: "
            "split both by the vocabulary (an embedding by vocabulary, its head by column)"
        )
    _check_nesting(module, plan)
    plan.whole = describe_rest(module, plan)
    return plan


def _is_table(module: nn.Module, layer: Layer) -> bool:
    return layer.style is Style.HEADS and isinstance(module.get_submodule(layer.name), nn.Embedding)


def _styles(module: nn.Module, patterns: Mapping[str, str]) -> dict[str, Style]:
    styles: dict[str, Style] = {}
    for pattern, text in patterns.items():
        if text == "replicated":
            continue
        style = parse_style(text)
        if style is None:
            known = ", ".join([*(style.value for style in Style), "replicated"])
            raise ValueError(f"a layer is split by {known}; got {text!r} for {pattern!r}")
        names = [name for name, _ in module.named_modules() if name and fnmatchcase(name, pattern)]
        if not names:
            linear = [name for name, part in module.named_modules() if is_linear(part)]
            raise ValueError(
                f"the plan's pattern {pattern!r} fits no module; there are, for example, "
                + ", ".join(linear[:4] or ["no linear layers"])
            )
        for name in names:
            _check_kind(name, module.get_submodule(name), style)
            if styles.get(name, style) is not style:
                raise ValueError(f"the plan splits {name} by {styles[name].value} and by {text}")
            styles[name] = style
    return styles


def _check_kind(name: str, module: nn.Module, style: Style) -> None:
    fits, wanted = is_linear(module), "a linear layer without a forward of its own"
    if style is Style.VOCABULARY:
        fits = may_split_rows(module)
        wanted = "a plain nn.Embedding without max_norm and scale_grad_by_freq"
    elif style is Style.HEADS:
        fits, wanted = type(module) is nn.MultiheadAttention, "a plain nn.MultiheadAttention"
    if not fits:
        raise ValueError(
            f"{style.value} is for {wanted}; {name} is a {type(module).__name__}. Leave it out of "
            "the plan, or give the pattern of a layer inside it."
        )


def _pairs(module: nn.Module, styles: Mapping[str, Style]) -> list[Candidate]:
    """Columns and the one row of the same module, if the row takes what each column gives."""
    by_parent: dict[str, dict[str, Style]] = {}
    for name, style in styles.items():
        parent, _, key = name.rpartition(".")
        if style in (Style.COLUMN, Style.ROW):
            by_parent.setdefault(parent, {})[key] = style
    pairs = []
    for parent, own in by_parent.items():
        columns = tuple(key for key, style in own.items() if style is Style.COLUMN)
        rows = [key for key, style in own.items() if style is Style.ROW]
        if len(rows) == 1 and columns:
            part = module.get_submodule(parent)
            width = sizes_of(part.get_submodule(rows[0]))[0]
            if all(sizes_of(part.get_submodule(key))[1] % width == 0 for key in columns):
                pairs.append(Candidate(parent, columns, rows[0]))
    return pairs


def _checked(module: nn.Module, candidate: Candidate, num_ranks: int) -> SplitBlock:
    block = module.get_submodule(candidate.block)
    sizes = [sizes_of(block.get_submodule(path))[1] for path in candidate.columns]
    width = sizes_of(block.get_submodule(candidate.row))[0]
    proposal = Proposal.by_sections(sizes, width)
    names = ", ".join(candidate.names[:-1])
    if width % num_ranks:
        raise ValueError(
            f"the {width} features between {names} and {candidate.row} do not divide by the "
            f"{num_ranks} ranks"
        )
    for name in candidate.names:
        _check_may_split(name, module.get_submodule(name))
        _check_hooks(candidate, [module.get_submodule(name)], names)
    try:
        verdict = try_proposal(candidate, block, proposal, num_ranks)
    except TypeError as error:  # it wants more than one tensor: the plan of the user is trusted
        if not proposal.is_plain:
            raise ValueError(
                f"{names} gives several things at once, and where they are cut apart cannot be "
                f"found out, because {candidate.block or 'the model'} cannot be called with one "
                "tensor: leave the row out of the plan, and the column's outputs are joined"
            ) from error
        _check_hooks(candidate, obstacles.inner_modules(block), names)
        return make_block(candidate, untried(candidate, block, proposal, drops=True))
    if verdict is None:
        raise ValueError(
            f"{candidate.block or 'the model'} does not give the same if {names} is split by "
            f"column and {candidate.row} by row: what is between them needs all features. Leave "
            "the row out of the plan, and the column's outputs are joined."
        )
    _check_hooks(candidate, [block.get_submodule(path) for path in verdict.finding.inside], names)
    return make_block(candidate, verdict)


def _check_hooks(candidate: Candidate, inside: Sequence[nn.Module], names: str) -> None:
    if obstacles.have_hooks(inside):
        raise ValueError(
            f"{names} and {candidate.row} cannot be split together: hooks on them, or between "
            "them, would get parts of activations. Leave the row out of the plan, and the column's "
            "outputs are joined; or remove the hooks."
        )


def _check_may_split(name: str, layer: nn.Module) -> None:
    reason = obstacles.reason_to_stay_whole(layer)
    if reason is not None:
        raise ValueError(
            f"{name} cannot be split: {reason}. Leave it out of the plan, or remove the hooks."
        )


def _alone(module: nn.Module, name: str, style: Style, num_ranks: int) -> SplitBlock:
    part = module.get_submodule(name)
    _check_may_split(name, part)
    if isinstance(part, nn.MultiheadAttention):
        raise ValueError(f"{name} has {part.num_heads} heads, too few for {num_ranks} ranks")
    parent = module.get_submodule(name.rpartition(".")[0])
    own = [f"{name.rpartition('.')[2]}.{key}" for key, _ in part.named_parameters()]
    is_used = is_linear(part) and uses_parameters(parent, part, own)
    if is_used or obstacles.reads_weights(parent):
        raise ValueError(
            f"{name} cannot be split: the code of {type(parent).__name__} reads weights of its "
            "layers, and would get a part. Call the layers instead."
        )
    if isinstance(part, nn.Embedding):
        size = part.num_embeddings
    else:
        size = sizes_of(part)[0 if style is Style.ROW else 1]
    if size < num_ranks:
        raise ValueError(f"{name} has {size} features to share out over {num_ranks} ranks")
    return alone(name, style, size)


def _check_nesting(module: nn.Module, plan: TensorPlan) -> None:
    inside = {module.get_submodule(name): block for block in plan.blocks for name in block.inside}
    for layer in plan.layers:
        outer = inside.get(module.get_submodule(layer.name))
        if outer is not None:
            raise ValueError(
                f"{layer.name} cannot be split: it is called between the column and the row of "
                f"{outer.name or 'the model'}, where each rank has a part already. Leave one of "
                "them out of the plan."
            )
