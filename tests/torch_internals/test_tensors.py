"""Tensors: versions, memory, hooks and subclasses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from needs import needs
from shoal.torch_internals import tensors


class Counting(Tensor):
    """Counts how often it is asked."""

    num_asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.num_asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """Has a shape, and sees operations in dispatch only."""

    seen: list[str] = []  # noqa: RUF012 (one for the test)
    __torch_function__ = tensors.no_torch_function

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Wrapper:
        made: Wrapper = tensors.make_wrapper(cls, torch.Size(shape), dtype=torch.float64)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return torch.zeros(2)


def test_versions_count_writes_in_place() -> None:
    tensor = torch.zeros(3)
    before = tensors.version_of(tensor), tensors.sum_of_versions([tensor, tensor])
    tensor.detach().add_(1)
    after = tensors.version_of(tensor), tensors.sum_of_versions([tensor, tensor])
    assert after == (before[0] + 1, before[1] + 2), needs("views share a count of writes")


def test_a_version_can_be_kept_while_values_change() -> None:
    weight = torch.ones(2, requires_grad=True)
    result = weight * weight.detach().clone()
    with torch.no_grad(), tensors.keeping_version(weight):
        weight.mul_(2)
    result.sum().backward()
    assert tensors.version_of(weight) == 0, needs("the count of writes can be kept")


def test_tensors_of_one_memory_have_one_id() -> None:
    tensor, other = torch.zeros(3), torch.zeros(3)
    assert tensors.storage_id(tensor) == tensors.storage_id(tensor[1:]), needs("one id a memory")
    assert tensors.storage_id(tensor) != tensors.storage_id(other), needs("an id for each memory")


def test_users_of_a_memory_are_counted() -> None:
    tensor = torch.zeros(3)
    alone = tensors.num_storage_users(tensor)
    view = tensor[1:]
    assert tensors.num_storage_users(tensor) == alone + 1, needs("views count as users of memory")
    del view
    assert tensors.num_storage_users(tensor) == alone, needs("users that are gone do not count")


def test_hooks_are_found_in_the_order_of_their_calls() -> None:
    parameter, called = nn.Parameter(torch.ones(1)), []
    assert not tensors.hooks_before_gradient(parameter), needs("no hooks at first")
    assert not tensors.hooks_after_gradient(parameter), needs("no hooks at first")
    parameter.register_hook(lambda _: called.append("before"))
    handle = parameter.register_post_accumulate_grad_hook(lambda _: called.append("first"))
    parameter.register_post_accumulate_grad_hook(lambda _: called.append("second"))
    assert len(tensors.hooks_before_gradient(parameter)) == 1, needs("hooks of gradients")
    hooks = tensors.hooks_after_gradient(parameter)
    assert next(iter(hooks)) == handle.id, needs("hooks by their handle's id")
    hooks[handle.id] = hooks.pop(handle.id)
    parameter.sum().backward()
    assert called == ["before", "second", "first"], needs("hooks are called in the dict's order")


def test_subclasses_can_be_taken_for_plain_tensors() -> None:
    tensor = torch.zeros(2).as_subclass(Counting)
    Counting.num_asked = 0
    with tensors.as_plain_tensors():
        assert tensor.shape == (2,)
    with tensors.without_torch_function():
        assert tensor.shape == (2,)
    assert Counting.num_asked == 0, needs("__torch_function__ can be switched off")
    assert tensor.shape == (2,)
    assert Counting.num_asked == 1, needs("__torch_function__ is on again after the context")


def test_a_wrapper_has_a_shape_and_no_memory_and_sees_operations() -> None:
    wrapper = Wrapper((2, 3))
    assert (wrapper.shape, wrapper.dtype) == ((2, 3), torch.float64), needs("wrappers have a shape")
    Wrapper.seen.clear()
    torch.sum(wrapper)
    assert Wrapper.seen == ["aten.sum.default"], needs("wrappers are seen in dispatch alone")


def test_a_mode_sees_operations_inside_of_operations() -> None:
    seen = []

    class Mode(tensors.DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2))
    names = [str(tensors.schema_of(each).name) for each in seen]
    assert "aten::mm" in names, needs("a dispatch mode sees what linear is made of")


def test_schemas_tell_what_is_written() -> None:
    schema = tensors.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable, needs("an operator's schema says whether it writes")
    written = [
        each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write
    ]
    assert written == ["self"], needs("an operator's schema says what it writes to")


def test_lists_of_a_subclass_go_to_foreach_operators_at_once() -> None:
    class Listed(Counting):
        pass

    tensors.allow_in_foreach(Listed)
    tensors.allow_in_foreach(Listed)
    grouped = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
    assert grouped is not None, needs("torch groups tensors for foreach operators")
    gradients = [torch.ones(2).as_subclass(Listed) for _ in range(5)]
    Counting.num_asked = Listed.num_asked = 0
    torch.nn.utils.get_total_norm(gradients)
    with_five = Listed.num_asked
    Listed.num_asked = 0
    torch.nn.utils.get_total_norm(gradients[:1])
    assert with_five < 5 * Listed.num_asked, needs("clipping asks known subclasses once a list")


def test_foreach_operators_work_on_lists() -> None:
    targets, sources = [torch.zeros(2)], [torch.tensor([3.0, 4.0])]
    tensors.foreach_copy_(targets, sources)
    (norm,) = tensors.foreach_norm(targets, 2)
    assert norm == 5, needs("foreach operators copy and take norms")


def test_named_attributes_are_attributes_of_tensors() -> None:
    names = tensors.ATTRIBUTES_WITHOUT_VALUES | tensors.ATTRIBUTES_OF_MEMORY
    missing = sorted(name for name in names if not hasattr(Tensor, name))
    assert not missing, needs(f"tensors have {missing}")


def test_detached_below_autograd() -> None:
    """A mode may keep a result without its graph, and learns that it was overwritten."""
    kept: list[Tensor] = []

    class Keeping(tensors.DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            kept.append(tensors.detached_below_autograd(result))
            return result

    with Keeping():
        result = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
    assert result.requires_grad
    assert not kept[-1].requires_grad, needs("a result can be detached below autograd")
    before = tensors.version_of(kept[-1])
    result.add_(1)
    assert tensors.version_of(kept[-1]) > before, needs("both count their writes together")
