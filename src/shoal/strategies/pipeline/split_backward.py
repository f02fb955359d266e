"""Backward in two halves: first the gradients of the inputs, later those of the weights.

[Note: two halves]
Autograd computes only the gradients that are asked for. The first half asks for those of the
inputs. Its path through the graph passes the nodes where weights come in (matrix products, for
example), and the gradients that arrive at such a node are kept. The second half starts again from
these nodes and asks for the gradients of the weights only: nothing is computed twice. A weight that
comes in at several nodes is done in the first half, because a second half that starts from one of
these nodes would pass the others again. Nodes written in Python (`torch.autograd.Function`) compute
all of their gradients in both halves: the result is right, but no time is gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import GraphExecGroup

Node = Any


class SplitBackward:
    """The backward pass of one graph.

    Example:
        >>> x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> halves = SplitBackward([(x * w).sum()], [None], [x])
        >>> halves.to_inputs(); w.grad is None
        True
        >>> halves.to_weights(); w.grad
        tensor([1., 1.])
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | GradientEdge],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
    ) -> None:
        """``gradients`` are those of ``tensors``, which may be edges to them.

        Gradients of ``inputs`` come first.
        """
        self._tensors: list[Any] = list(tensors)
        self._gradients = list(gradients)
        self._inputs = [tensor for tensor in inputs if tensor.requires_grad]
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}

    def to_inputs(self) -> None:
        """Computes the gradients of the inputs, and of weights that come in at several nodes."""
        if not self._inputs:  # the first stage: all gradients are those of weights
            self._weights, self._apart = {}, list(range(len(self._tensors)))
            return
        graph = _Graph(self._tensors, self._inputs)
        self._weights = graph.weights_by_node
        leads_back = [graph.leads_back[_node(tensor)] for tensor in self._tensors]
        self._apart = [index for index, leads in enumerate(leads_back) if not leads]
        keep = self._arrived.__setitem__
        handles = [node.register_prehook(partial(keep, node)) for node in self._weights]
        wanted = [*self._inputs, *graph.early_weights]
        tensors = list(compress(self._tensors, leads_back))
        if tensors:
            gradients = list(compress(self._gradients, leads_back))
            torch.autograd.backward(tensors, gradients, inputs=wanted, retain_graph=True)
        for handle in handles:
            handle.remove()

    def to_weights(self) -> None:
        """Computes the gradients that are still missing, and frees the graph."""
        with GraphExecGroup():  # a block that is computed again is so once for all of its weights
            self._differentiate_weights()
        self._tensors, self._gradients = [], []
        self._weights, self._arrived = {}, {}

    def _differentiate_weights(self) -> None:
        for node, weights in self._weights.items():
            arrived = [
                (GradientEdge(node, index), gradient)
                for index, gradient in enumerate(self._arrived.get(node, ()))
                if gradient is not None
            ]
            if arrived:
                edges, gradients = zip(*arrived, strict=True)
                torch.autograd.backward(edges, gradients, inputs=weights)
        if self._apart:
            tensors = [self._tensors[index] for index in self._apart]
            torch.autograd.backward(tensors, [self._gradients[index] for index in self._apart])


class _Graph:
    """Which nodes of a graph lead back to inputs, and at which nodes weights come in.

    Attributes:
        leads_back: Whether a node depends on the inputs.
        weights_by_node: The weights that come in at one node only, by that node.
        early_weights: The weights that come in at several nodes.
    """

    def __init__(self, tensors: Sequence[Tensor | GradientEdge], inputs: Sequence[Tensor]) -> None:
        self._inputs = {id(tensor) for tensor in inputs}
        self.leads_back: dict[Node, bool] = {}
        self._weights: dict[Node, dict[int, Tensor]] = {}
        """The weights that come in at a node, by edges that do not lead back to inputs."""
        for tensor in tensors:
            self._explore(_node(tensor))
        uses: dict[int, list[tuple[Node, Tensor]]] = {}
        for node in (node for node, leads_back in self.leads_back.items() if leads_back):
            for key, weight in self._weights[node].items():
                uses.setdefault(key, []).append((node, weight))
        self.weights_by_node: dict[Node, list[Tensor]] = {}
        for (node, weight), *others in uses.values():
            if not others:
                self.weights_by_node.setdefault(node, []).append(weight)
        self.early_weights = [each[0][1] for each in uses.values() if len(each) > 1]

    def _explore(self, start: Node) -> None:
        """Judges children before parents; without recursion, because graphs are deep."""
        stack: list[tuple[Node, list[Node] | None]] = [(start, None)]
        leads_back = self.leads_back
        while stack:
            node, children = stack.pop()
            if node in leads_back:
                continue
            if children is not None:
                self._judge(node, children)
                continue
            children = [child for child, _ in node.next_functions if child is not None]
            stack.append((node, children))
            stack += [(child, None) for child in children if child not in leads_back]

    def _judge(self, node: Node, children: list[Node]) -> None:
        leads_back = self.leads_back
        if children:
            leads_back[node] = any(leads_back[child] for child in children)
            aside = [self._weights[child] for child in children if not leads_back[child]]
            self._weights[node] = {key: each for weights in aside for key, each in weights.items()}
            return
        variable: Any = getattr(node, "variable", None)
        leads_back[node] = variable is not None and id(variable) in self._inputs
        has_weight = variable is not None and not leads_back[node]
        self._weights[node] = {id(variable): variable} if has_weight else {}


def _node(tensor: Tensor | GradientEdge) -> Node:
    if isinstance(tensor, GradientEdge):
        return tensor.node
    return torch.autograd.graph.get_gradient_edge(tensor).node
