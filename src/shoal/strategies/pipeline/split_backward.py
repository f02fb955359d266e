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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

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
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
    ) -> None:
        """``gradients`` are those of ``tensors``; gradients of ``inputs`` come first."""
        self._tensors, self._gradients = list(tensors), list(gradients)
        self._inputs = [tensor for tensor in inputs if tensor.requires_grad]
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}

    def to_inputs(self) -> None:
        """Computes the gradients of the inputs, and of weights that come in at several nodes."""
        if not self._inputs:  # the first stage: all gradients are those of weights
            self._weights, self._apart = {}, list(range(len(self._tensors)))
            return
        graph = _Graph(self._tensors, self._inputs)
        self._weights = graph.weights_by_node()
        self._apart = [
            index for index, tensor in enumerate(self._tensors) if not graph.leads_back(tensor)
        ]
        early = graph.early_weights()
        handles = [node.register_prehook(self._keeper(node)) for node in self._weights]
        wanted = [*self._inputs, *early]
        tensors = [t for index, t in enumerate(self._tensors) if index not in self._apart]
        gradients = [g for index, g in enumerate(self._gradients) if index not in self._apart]
        if wanted and tensors:
            torch.autograd.backward(tensors, gradients, inputs=wanted, retain_graph=True)
        for handle in handles:
            handle.remove()

    def _keeper(self, node: Node) -> Any:
        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            self._arrived[node] = gradients

        return keep

    def to_weights(self) -> None:
        """Computes the gradients that are still missing, and frees the graph."""
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
        self._tensors, self._gradients = [], []
        self._weights, self._arrived = {}, {}


class _Graph:
    """Which nodes of a graph lead back to inputs, and at which nodes weights come in."""

    def __init__(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._inputs = {id(tensor) for tensor in inputs}
        self._leads_back: dict[Node, bool] = {}
        self._weights: dict[Node, dict[int, Tensor]] = {}
        """The weights that come in at a node, by edges that do not lead back to inputs."""
        for tensor in tensors:
            self._explore(_node(tensor))
        self._nodes_of_weight: dict[int, list[Node]] = {}
        for node, leads_back in self._leads_back.items():
            if leads_back:
                for weight in self._weights[node]:
                    self._nodes_of_weight.setdefault(weight, []).append(node)

    def _explore(self, start: Node) -> None:
        """Judges children before parents; without recursion, because graphs are deep."""
        stack: list[tuple[Node, list[Node] | None]] = [(start, None)]
        leads_back = self._leads_back
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
        if not children:
            self._judge_leaf(node)
            return
        leads_back = self._leads_back
        leads_back[node] = any(leads_back[child] for child in children)
        aside = [self._weights[child] for child in children if not leads_back[child]]
        self._weights[node] = {key: weight for weights in aside for key, weight in weights.items()}

    def _judge_leaf(self, node: Node) -> None:
        variable: Any = getattr(node, "variable", None)
        is_input = self._leads_back[node] = variable is not None and id(variable) in self._inputs
        has_weight = variable is not None and not is_input
        self._weights[node] = {id(variable): variable} if has_weight else {}

    def leads_back(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the inputs."""
        return self._leads_back[_node(tensor)]

    def weights_by_node(self) -> dict[Node, list[Tensor]]:
        """The weights that come in at one node only, by that node."""
        found: dict[Node, list[Tensor]] = {}
        for nodes in self._nodes_of_weight.values():
            if len(nodes) == 1:
                found.setdefault(nodes[0], [])
        for node in found:
            weights = self._weights[node].items()
            found[node] = [w for key, w in weights if len(self._nodes_of_weight[key]) == 1]
        return found

    def early_weights(self) -> list[Tensor]:
        """The weights that come in at several nodes."""
        return [
            self._weights[nodes[0]][key]
            for key, nodes in self._nodes_of_weight.items()
            if len(nodes) > 1
        ]


def _node(tensor: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(tensor).node
