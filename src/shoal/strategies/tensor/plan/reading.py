"""Whether a module's code reads the weights of its layers, instead of calling them.

A layer that is split on its own joins its outputs when it is called. Code that takes its weight
(`F.multi_head_attention_forward(..., self.q_proj.weight, ...)`) would get a part without a word.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

# What may be asked of a weight that is split.
_READ = r"\.(?:weight|bias)\b(?!\s*(?:\.(?:dtype|device|is_\w+)\b|is\b|,\s*torch\.Tensor))"
_READING = re.compile(_READ)
_SETTING_UP = ("__init__", "reset", "_reset", "init", "_init", "tie", "_tie", "extra_repr", "from_")


def reads_weights(module: nn.Module) -> bool:
    """Whether any method of a module, but for setting it up, uses a weight or a bias itself."""
    return any(_READING.search(source) for source in _sources(module))


def is_reading(function: Any) -> bool:
    """Whether a function, such as a hook, uses a weight or a bias itself."""
    return _READING.search(_source(function)) is not None


def reads_weight_of(module: nn.Module, name: str) -> bool:
    """Whether code of any module that a layer is in uses the layer's weight or bias by its name."""
    *outer, key = name.split(".")
    reading = re.compile(rf"\.{re.escape(key)}{_READ}")
    users = [module.get_submodule(".".join(outer[:depth])) for depth in range(len(outer) + 1)]
    return any(reading.search(source) for user in users for source in _sources(user))


def _sources(module: nn.Module) -> tuple[str, ...]:
    kind: Any = type(module)
    return _sources_of(kind)


@functools.cache
def _sources_of(kind: Any) -> tuple[str, ...]:
    return tuple(_read_sources(kind))


def _read_sources(kind: type) -> Iterator[str]:
    """Of every method; of those that others take the place of, only if they are still called."""
    replaced: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for name, method in vars(base).items():
            if inspect.isfunction(method) and not name.startswith(_SETTING_UP):
                if name in replaced:
                    continue
                source = _source(method)
                yield source
                if "super" not in source:
                    replaced.add(name)


def _source(method: Any) -> str:
    try:
        return _without_texts(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError):  # made on the fly: nobody can look
        return "super().layer.weight @ x"


def _without_texts(source: str) -> str:
    return re.sub(r'""".*?"""|#[^\n]*', "", source, flags=re.S)
