"""Finds private names of torch in source, by syntax: nothing is imported.

Three kinds are found: imports of private names from torch, private parts of a dotted name that
begins with something imported from torch (``torch._C._functorch``), and private attributes of
torch's objects. No syntax tells whose attribute it is, so the last kind goes by the list below.
Operators that are named in a string (``"_foreach_copy_"``) are not counted, attributes are
(``getattr(tensor, "_version")``).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

# Private attributes of torch's objects; to be extended when another one is used.
ATTRIBUTES = frozenset(
    {
        # tensors, their storages and operators
        *("_version", "_base", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *("_cdata", "_typed_storage", "_schema", "_grad_fn"),
        # modules
        *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_named_members"),
        *("_call_impl", "_compiled_call_impl", "_orig_mod", "_backward_pre_hooks"),
        *("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_extra_state"),
        *("_check_input_dim", "_reset_parameters", "_qkv_same_embed_dim", "_ff_block"),
        *("_load_from_state_dict", "_save_to_state_dict", "_metadata", "_is_full_backward_hook"),
        # optimizers, gradient scalers, loaders
        *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_step_supports_amp_scaling"),
        *("_in_backward_optimizers", "_unscale_grads_", "_scale", "_found_inf_per_device"),
        *("_per_optimizer_states", "_num_yielded", "_num_workers", "_iterator"),
        # process groups
        *("_Options", "_devices", "_timeout", "_allgather_base", "_set_default_timeout"),
        *("_get_backend", "_execution_engine"),
    }
)


def find_in(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """The files that use each private name, by the name."""
    files = defaultdict(set)
    for file, tree in trees.items():
        for name in private_names(tree):
            files[name].add(file)
    return {name: sorted(found) for name, found in sorted(files.items())}


def private_names(tree: ast.Module) -> Iterator[str]:
    from_torch = set(names_from_torch(tree))
    own = set(own_attributes(tree))
    for node in ast.walk(tree):
        yield from imported(node)
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_known = node.attr in ATTRIBUTES and ast.unparse(node) not in own
            if is_known or root_of(node) in from_torch:
                yield node.attr
        elif isinstance(node, ast.Constant) and node.value in ATTRIBUTES:
            yield node.value


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch"


def imported(node: ast.AST) -> Iterator[str]:
    """Private modules and names in an import from torch."""
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names if is_torch(alias.name)]
    elif isinstance(node, ast.ImportFrom) and is_torch(node.module):
        modules = [f"{node.module}.{alias.name}" for alias in node.names]
    for module in modules:
        yield from {part for part in module.split(".") if is_private(part)}


def names_from_torch(tree: ast.Module) -> Iterator[str]:
    """What imports from torch are called in this file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_torch(alias.name):
                    yield alias.asname or "torch"
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module):
            yield from (alias.asname or alias.name for alias in node.names)


def own_attributes(tree: ast.Module) -> Iterator[str]:
    """Attributes that the classes of a file give themselves: ``self._timeout = 1``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"self.{node.name}"
        elif isinstance(node, ast.Attribute) and is_own(node):
            yield ast.unparse(node)


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and root_of(node) == "self"


def root_of(node: ast.Attribute) -> str | None:
    """The first name of a dotted name."""
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else None
