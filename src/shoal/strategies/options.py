"""Checks options by a strategy's model: which it has, of what type, and whether ranks agree."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from shoal.comm import Backend
from shoal.comm.operation.whole import Barrier
from shoal.compression import Codec
from shoal.strategies.wrapper import ModuleWrapper

# What people pass who come from torch's DDP and FSDP, DeepSpeed, Accelerate or Megatron.
_ELSEWHERE = {
    "find_unused_parameters": "parameters that a rank does not use are noticed anyway",
    "static_graph": "every step may use other parameters, at no extra cost",
    "broadcast_buffers": "buffers are rank 0's at the beginning of each forward in training; "
    "average_buffers=True takes the average instead",
    "gradient_as_bucket_view": "gradients always lie in the memory that is reduced",
    "bucket_cap_mb": "say min_group_bytes=, in bytes, for how much travels at once",
    "device_ids": "move the model to its device before it is wrapped",
    "output_device": "move the model to its device before it is wrapped",
    "process_group": "pass the ranks as world= to the model's class (shoal.strategies), for "
    "example the axis of a mesh",
    "device_mesh": "say data=, tensor= and pipeline= of strategy 'hybrid', or replica= of 'fsdp'",
    "mesh": "say data=, tensor= and pipeline= of strategy 'hybrid', or replica= of 'fsdp'",
    "ignored_params": "freeze what is not to be trained (requires_grad_(False)), say "
    "resident_below= for small parameters that are to stay whole, or wrap a part of the model",
    "reshard_after_forward": "strategy 'zero3' frees parameters after use, 'zero2' keeps them",
    "auto_wrap_policy": "what travels together is found by itself; say min_group_bytes= for how "
    "much at least",
    "sharding_strategy": "choose strategy='ddp', 'zero1', 'zero2', 'zero3' or 'fsdp'",
    "mixed_precision_policy": 'say mixed_precision="bf16" or "fp16"',
    "dtype": 'say mixed_precision="bf16" or "fp16"',
    "cpu_offload": "nothing is offloaded: shard more (strategy 'zero3'), or use more ranks",
    "activation_checkpointing": 'say activations="full" or "selective"',
    "use_orig_params": "parameters always are the module's own",
    "sync_module_states": "every rank always begins with rank 0's values",
    "prefetch": "parameters are gathered ahead, in the order of the first pass of its kind; say "
    "prefetch_bytes= for how much",
    "limit_all_gathers": "what is under way is always bounded",
    "gradient_accumulation_steps": "use `with model.no_sync():` around all backwards but the last",
    "gradient_clipping": "call model.clip_grad_norm_(...) before optimizer.step()",
    "stage": "choose strategy='zero1', 'zero2' or 'zero3'; zero= is for 'tensor', 'pipeline' and "
    "'hybrid'",
    "num_microbatches": "say micro_batches= of strategy 'pipeline' or 'hybrid'",
    "config": "options are given by name, one by one",
    "comm_hook": 'say compression="int8", "powersgd:2" or another one of docs/guide/compression.md',
    "zero_quantized_weights": 'say gather_compression="int8" under strategy \'zero1\', \'zero2\', '
    "'zero3' or 'fsdp'",
    "timeout": "say shoal.init(timeout=...) before, or timeout= of shoal.run",
    "ranks": "how many ranks there are is said where they are started, as in shoal launch -n 4",
    "scheduler": "make it from the optimizer that comes back; it needs no wrapping",
    "kind": "pass it to the optimizer's class (shoal.optim), as in ZeRO2Optimizer(..., kind=...)",
    "dataloader": "pass it as loader=",
    "lr": "it is the optimizer's",
    "device": "move the model to its device before it is wrapped",
    "delay_all_reduce_named_params": "parameters that a rank does not use are noticed anyway",
    "module": "pass it as model=",
    "batch_size": "the loader's batch is that of all ranks, and is divided among them",
    "shuffle": "the loader knows",
}  # fmt: skip
_SYNONYMS = {
    "world_size": "ranks", "nproc_per_node": "ranks", "lr_scheduler": "scheduler",
    "train_loader": "dataloader", "data_loader": "dataloader", "dataloaders": "dataloader",
    "device_id": "device_ids", "init_sync": "sync_module_states", "learning_rate": "lr",
    "param_init_fn": "sync_module_states", "check_reduction": "static_graph",
    "skip_all_reduce_unused_params": "find_unused_parameters", "shard_placement_fn": "device_mesh",
    "ignored_modules": "ignored_params", "ignored_states": "ignored_params",
    "fsdp_auto_wrap_policy": "auto_wrap_policy", "mp_policy": "mixed_precision_policy",
    "param_dtype": "dtype", "reduce_dtype": "dtype", "fp16": "dtype", "bf16": "dtype",
    "offload_policy": "cpu_offload", "offload_optimizer": "cpu_offload",
    "offload_param": "cpu_offload", "forward_prefetch": "prefetch", "backward_prefetch": "prefetch",
    "gradient_checkpointing": "activation_checkpointing",
    "checkpoint_activations": "activation_checkpointing",
    "zero_stage": "stage", "n_microbatches": "num_microbatches", "chunk_size": "num_microbatches",
    "gather_compression": "zero_quantized_weights",
    "gradient_compression": "comm_hook", "communication_hook": "comm_hook",
    "config_params": "config", "ds_config": "config", "deepspeed_plugin": "config",
    "fsdp_plugin": "config", "kwargs_handlers": "config",
}  # fmt: skip


# What a value is an instance of, for types that Python takes more or less than.
_INSTANCES: dict[Any, type] = {int: Integral, float: Real}
_IN_WORDS = {bool: "True or False", int: "a whole number", str: "a string", NoneType: "None"}
_MAY_BE_NEGATIVE = ("seed",)
# A rank may have values of its own, or none that count.
_MAY_DIFFER = ("seed", "memory")
_COMPARED = (bool, int, float, str, tuple, list, Codec)
# Its parser names the option, the value and what there is.
_CHECKED_BY_PARSER = ("mixed_precision", "outer")


def check_options(
    options: Mapping[str, Any], strategy: str, models: Mapping[str, type[ModuleWrapper]]
) -> None:
    """Raises for an option that a strategy does not have, or a value that it cannot have.

    Raises:
        TypeError: It names the option and the strategy, and says what there is instead.
        ValueError: A number is negative.
    """
    known = options_of(models[strategy])
    for name, value in options.items():
        if name not in known:
            advice = _advice(name, list(known), models)
            raise TypeError(f"strategy {strategy!r} has no option {name!r}: {advice}")
        if name not in _CHECKED_BY_PARSER:
            check_type(name, value, known[name])
        is_number = isinstance(value, Real) and name not in _MAY_BE_NEGATIVE
        if is_number and value < 0:
            raise ValueError(f"option {name!r} must not be negative; got {value!r}")


def compare_options(
    options: Mapping[str, Any], model_class: type[ModuleWrapper], strategy: str, backend: Backend
) -> None:
    """Raises on all ranks if they wrap with different strategies or options.

    Otherwise they would differ in their operations only, much later. Headers say it: what a rank
    finds in data it may have found too late, when another has ended.
    """
    usual = _defaults_of(model_class)
    said = [f"strategy={strategy!r}"]
    for name, value in sorted(options.items()):
        is_usual = type(value) is type(usual[name]) and value == usual[name]
        if isinstance(value, _COMPARED) and not is_usual and name not in _MAY_DIFFER:
            said.append(f"{name}={value!r}")
        elif callable(value):  # two functions cannot be compared; whether there is one can
            said.append(f"{name}='a function'")
    backend.run(Barrier(f"wrapping with {', '.join(said)}"))


def _defaults_of(model_class: type[ModuleWrapper]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in model_class.__mro__:
        if issubclass(kind, ModuleWrapper) and "__init__" in vars(kind):
            for name, parameter in inspect.signature(kind.__init__).parameters.items():
                found.setdefault(name, parameter.default)
    return found


def options_of(model_class: type[ModuleWrapper]) -> dict[str, Any]:
    """The options that a model's class takes, its own and those that it hands on, with types."""
    found: dict[str, Any] = {}
    for kind in model_class.__mro__:
        if issubclass(kind, ModuleWrapper) and "__init__" in vars(kind):
            hints = get_type_hints(kind.__init__)
            for name, parameter in inspect.signature(kind.__init__).parameters.items():
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    found.setdefault(name, hints[name])
    return {name: hint for name, hint in found.items() if name not in model_class.settled}


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raises a TypeError that names the option if its value is not of the type."""
    allowed = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    if not any(_is_a(value, get_origin(each) or each) for each in allowed):
        words = [_IN_WORDS.get(each) or getattr(each, "__name__", str(each)) for each in allowed]
        raise TypeError(f"option {name!r} must be {' or '.join(words)}; got {value!r}")


def _is_a(value: Any, kind: Any) -> bool:
    if isinstance(value, bool | str):  # which are numbers and sequences, too
        return isinstance(value, kind) and kind in (bool, str)
    return isinstance(value, _INSTANCES.get(kind, kind))


def _advice(name: str, known: list[str], models: Mapping[str, type[ModuleWrapper]]) -> str:
    reason = _ELSEWHERE.get(_SYNONYMS.get(name, name))
    if reason is not None:
        return reason
    whose = _whose(name, models)
    if whose:
        return whose
    there = f"It has {', '.join(known)}"
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}? {there}"
    everywhere = {option for kind in models.values() for option in options_of(kind)}
    close = difflib.get_close_matches(name, sorted(everywhere), n=1)
    if close:
        return f"did you mean {close[0]!r}? {_whose(close[0], models).capitalize()}. {there}"
    return there


def _whose(option: str, models: Mapping[str, type[ModuleWrapper]]) -> str:
    owners = [repr(name) for name, kind in models.items() if option in options_of(kind)]
    return f"it is one of {', '.join(owners)}" if owners else ""
