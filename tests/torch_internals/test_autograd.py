"""Autograd, transforms and compilation."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from needs import needs
from shoal.torch_internals import autograd


def test_a_running_backward_is_noticed_and_its_end_too() -> None:
    leaf, found = torch.ones(1, requires_grad=True), []

    def hook(_: torch.Tensor) -> None:
        found.append(autograd.is_in_backward())
        autograd.call_after_backward(lambda: found.append("end"))

    leaf.register_hook(hook)
    (leaf * 2).sum().backward()
    assert found == [True, "end"], needs("a callback runs when a backward ends")
    assert not autograd.is_in_backward(), needs("outside of backward there is no graph task")


def test_hooks_of_saved_tensors_are_noticed() -> None:
    assert not autograd.has_saved_tensors_hooks(), needs("no hooks of saved tensors at first")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert autograd.has_saved_tensors_hooks(), needs("hooks of saved tensors can be seen")


def test_transforms_are_named() -> None:
    found: list[list[str]] = []

    def function(value: torch.Tensor) -> torch.Tensor:
        found.append(autograd.transforms())
        return value.sum()

    assert autograd.transforms() == [], needs("there are no transforms outside of torch.func")
    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    torch.func.jvp(function, (torch.ones(2),), (torch.ones(2),))
    assert found == [["Grad"], ["Vmap"], ["Jvp"]], needs("transforms of torch.func have names")


def test_forward_mode_is_noticed() -> None:
    assert not autograd.is_forward_mode(), needs("no level of forward mode at first")
    with forward_ad.dual_level():
        assert autograd.is_forward_mode(), needs("an open level of forward mode can be seen")


def test_tracing_is_noticed_and_functions_can_be_kept_from_it() -> None:
    found = []

    @autograd.not_compiled
    def outside() -> None:
        found.append(torch.compiler.is_compiling())

    def function(value: torch.Tensor) -> torch.Tensor:
        outside()
        return value + 1

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        found.append(autograd.is_tracing())
        return graph.forward

    compiled = torch.compile(function, backend=backend)
    assert compiled(torch.zeros(1)) == 1
    assert True in found, needs("what torch.compile traces can be told")
    assert found.count(False) == 1, needs("a function can be kept out of the compiler")
    assert not autograd.is_tracing(), needs("outside of torch.compile nothing is traced")
