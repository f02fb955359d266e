"""A function and its arguments as bytes, wherever the function was defined.

Scripts, notebook cells and closures are pickled by value, as cloudpickle does. The same is done
for modules that another process could not import or would import slowly: test modules, which
pytest loads by path and which bring pytest itself along.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import pickle
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from shoal.launch.function.unsendable import explain
from shoal.torch_internals.compiler_module import COMPILER

WORKER = "shoal.launch.function.worker:main"
"""What makes a call in another process."""
_INSTALLED = tuple(
    os.path.join(os.path.realpath(sysconfig.get_path(name)), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# What is registered with cloudpickle holds for the whole process.
_registering = threading.Lock()


def encode_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """`fn` and `args` for `decode_call` in a process with the same import path.

    Raises:
        TypeError: If something in it cannot be pickled; the message says what, where it is found.
    """
    try:
        return _encode((fn, args))
    except Exception as error:
        raise TypeError(explain(fn, args, error, _encode)) from None


def _encode(call: Any) -> bytes:
    buffer = io.BytesIO()
    with _registering:
        pickler = _Pickler(buffer)
        try:
            pickler.dump(call)
        finally:
            pickler.unregister()
    return buffer.getvalue()


def decode_call(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and arguments of `encode_call`."""
    fn, args = pickle.loads(payload)
    return fn, args


def will_use_compiler(call: bytes) -> bool:
    """A guess from an encoded call: whether its ranks are going to load torch's compiler.

    Any optimizer does. This process has had one itself, or the function speaks of one by name. A
    wrong guess costs one second, once.
    """
    return COMPILER in sys.modules or b"optim" in call


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Finds out about a module when the first thing from it is pickled: most never are."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._seen: set[str] = set()
        self._registered: list[types.ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType):
            self._look_at(obj)
        elif isinstance(obj, type | types.FunctionType):
            module = sys.modules.get(getattr(obj, "__module__", None) or "")
            if module is not None:
                self._look_at(module)
        return super().reducer_override(obj)

    def unregister(self) -> None:
        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)

    def _look_at(self, module: types.ModuleType) -> None:
        name = module.__name__
        if name in self._seen:
            return
        self._seen.add(name)
        if sys.modules.get(name) is not module or goes_by_name(module):
            return
        if name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)


def goes_by_name(module: types.ModuleType) -> bool:
    """Whether importing the module's name elsewhere is the way to get at what is in it.

    It is if that gives the same file. `importlib.util.find_spec` cannot tell: it answers from
    `sys.modules`.
    """
    if module.__name__ == "__main__":
        return True  # cloudpickle has its own rule for it
    loader = getattr(module, "__loader__", None)
    if type(loader).__module__.startswith("_pytest."):
        return False
    file = getattr(module, "__file__", None)
    if file is None or not os.path.exists(file):
        # Made by its package's own code (extensions do that): there if the package is.
        return _find(module.__name__.partition(".")[0]) is not None
    file = os.path.realpath(file)
    if file.startswith(_INSTALLED):
        return True
    spec = _find(module.__name__)
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == file


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    """Searches the import path for a dotted name without importing anything."""
    path: list[str] | None = None
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find_in(".".join(parts[:end]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _find_in(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Asks each finder in turn, as an import would."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = find_spec and find_spec(name, path)
        if spec is not None:
            return spec
    return None


def copy_call(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A copy of function and arguments for a rank in this process, as another would have it.

    What cannot be pickled, such as a closure over a lock, is shared instead: here that works.
    """
    try:
        return decode_call(_encode((fn, args)))
    except Exception:
        return fn, args
