"""What keeps layers whole: code that reads their weights, and the user's hooks.

Source code is a reason not to split a layer, never one to split. Code that cannot be looked at
counts as code that reads. What a look misses (an alias, a helper, a branch) is noticed when the
model runs; see [Note: reads of parts].

[Note: hooks]
Between a column and its row a hook would be given a rank's part, and what it does with that is
beyond any trial: it may keep a statistic where nobody looks. So a region has no hooks in it. Its
layers are split each on its own instead, and then whatever goes through a module is whole again. A
hook of a parameter would be given a part of the gradient however the layer is split, and one that
reads weights a part of them: these layers stay whole.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from torch import nn

from shoal.strategies.tensor.split_parameter import HARMLESS
from shoal.torch_internals.modules import OWN_PARAMETERS, hooks_of
from shoal.torch_internals.tensors import hooks_after_gradient, hooks_before_gradient
from shoal.torch_internals.trees import tree_leaves

_VALUES = frozenset({"weight", "bias"})
_ALL_PARAMETERS = frozenset({"parameters", "named_parameters", OWN_PARAMETERS, "state_dict"})
_SETTING_UP = ("__init__", "reset", "_reset", "init", "_init", "tie", "_tie", "extra_repr", "from_")


def reads_weights(module: nn.Module) -> bool:
    """Whether any method of a module, but for setting it up, uses a weight or a bias itself."""
    return any(_reads(method) for method in _methods_of(module))


def reads_weight_of(module: nn.Module, name: str, below: str | None = None) -> bool:
    """Whether code of a module that a layer is in uses the layer's weight or bias by its name.

    Torch's own modules do so for fast paths, which are switched off. ``below``: only modules that
    this one is in are looked at; by default those of the layer.
    """
    path = [] if below == "" else (name if below is None else below).split(".")
    users = [module.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    return any(
        _reads(method, name.rpartition(".")[2])
        for user in users
        for method in _methods_of(user)
        if not getattr(method, "__module__", "").startswith("torch.nn.")
    )


def hook_reads_weights(hook: Any) -> bool:
    """Whether a hook, which is given its module, uses any parameter of it."""
    code = _code_of(hook)
    if code is None or _reads(hook) or not _names_in(code).isdisjoint(_ALL_PARAMETERS):
        return True
    bound = [hook.args, hook.keywords] if isinstance(hook, functools.partial) else []
    kept = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves([bound, kept]))


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward was replaced: then its class does not say what it computes."""
    return "forward" in vars(module)


def _methods_of(module: nn.Module) -> list[Any]:
    kind: Any = type(module)
    own = [vars(module)["forward"]] if has_own_forward(module) else []
    return own + _methods(kind)


@functools.cache
def _methods(kind: Any) -> list[Any]:
    """Every method, with those it overrides where `super` may call them; and any other forward."""
    found: list[Any] = []
    overridden: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for name, method in vars(base).items():
            is_code = inspect.isfunction(method) or name == "forward"
            if not is_code or name.startswith(_SETTING_UP) or name in overridden:
                continue
            found.append(method)
            code = _code_of(method)
            if code is not None and "super" not in _names_in(code):
                overridden.add(name)
    return found


def _reads(function: Any, layer: str | None = None) -> bool:
    """Whether a function uses a weight or a bias; of any layer, or of one with this name."""
    code = _code_of(function)
    if code is None:
        return True
    if _VALUES.isdisjoint(_names_in(code)):
        return False
    tree = _tree_of(code)
    if tree is None:
        return layer is None or layer.isdigit() or layer in _names_in(code)
    harmless = {id(node) for node in _harmless_reads(tree)}
    return any(
        id(node) not in harmless and (layer is None or _is_named(node, layer))
        for node in ast.walk(tree)
        if _is_read(node)
    )


def _code_of(function: Any) -> CodeType | None:
    """The compiled code of a function, a method or a partial; None for what is not of Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)  # also of methods
    if code is None and not isinstance(function, type):
        code = getattr(inspect.getattr_static(function, "__call__", None), "__code__", None)
    return code if isinstance(code, CodeType) else None


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    """All names and texts in a function, and in functions inside of it."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return frozenset(names)


@functools.cache
def _tree_of(code: CodeType) -> ast.AST | None:
    """The source of a function; None if there is none, or only a piece of an expression."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None


def _is_read(node: ast.AST) -> bool:
    """``layer.weight``, or ``getattr(layer, "weight")``."""
    if isinstance(node, ast.Attribute):
        return node.attr in _VALUES
    return _is_call(node, "getattr") and any(
        isinstance(each, ast.Constant) and each.value in _VALUES
        for each in node.args  # type: ignore[attr-defined]
    )


def _is_named(node: Any, layer: str) -> bool:
    """Whether the layer whose weight is read has this name, or a number that may be its own."""
    owner = node.value if isinstance(node, ast.Attribute) else node.args[0]
    if isinstance(owner, ast.Subscript):
        return layer.isdigit()
    return isinstance(owner, ast.Attribute) and owner.attr == layer


def _harmless_reads(tree: ast.AST) -> Iterator[ast.AST]:
    """What is only asked for its type, its device, or whether it is there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in HARMLESS:
            yield node.value
        elif isinstance(node, ast.Compare) and all(
            isinstance(each, ast.Is | ast.IsNot) for each in node.ops
        ):
            yield from (node.left, *node.comparators)
        elif _is_call(node, "isinstance"):
            yield from node.args  # type: ignore[attr-defined]


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def have_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether any of the modules has a hook; see [Note: hooks]."""
    return any(map(hooks_of, modules))


def inner_modules(block: nn.Module) -> list[nn.Module]:
    """All modules in a block, without the block itself."""
    return list(block.modules())[1:]


def reason_to_stay_whole(layer: nn.Module) -> str | None:
    """Why a layer must not be split in any way; None if its hooks allow for it."""
    if any(hooks_before_gradient(p) or hooks_after_gradient(p) for p in layer.parameters()):
        return "its parameters have hooks, which would get parts of gradients"
    if any(type(p) is not nn.Parameter for p in layer.parameters()):
        return "its parameters have a class of their own"
    if have_reading_hooks(layer):
        return "it has a hook that reads weights, and would get parts"
    return None


def have_reading_hooks(module: nn.Module) -> bool:
    """Whether a hook of a module, or of one in it, uses weights itself."""
    return any(hook_reads_weights(hook) for part in module.modules() for hook in hooks_of(part))
