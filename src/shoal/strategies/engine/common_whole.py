"""The whole of a group where the ranks of a host have one between them."""

from __future__ import annotations

from torch import Tensor

from shoal.comm import Backend
from shoal.torch_support.private_view import PrivateView
from shoal.torch_support.raw import of_dtype


class CommonWhole:
    """One memory of all ranks: as everybody sees it, and as the parameters of this rank show it.

    See [Note: private views]. A rank steps its part of ``shared``; parameters are views of
    ``view``, where users may write.
    """

    def __init__(self, values: Tensor, backend: Backend, owner: int) -> None:
        """The owner's values count; all ranks make it together."""
        self._num_bytes, self._dtype = values.nbytes, values.dtype
        found = backend.share(max(values.nbytes, 1), owner)
        assert found is not None, f"{backend} does not share memory"
        memory, self._private = found
        self.shared = self._typed(memory)
        if backend.rank == owner:
            self.shared.copy_(values)
        backend.barrier()  # nobody looks at it before
        self.view = self._typed(self._private.memory)

    def _typed(self, memory: Tensor) -> Tensor:
        return of_dtype(memory[: self._num_bytes], self._dtype)

    def written(self) -> list[tuple[int, int]]:
        """Ranges of elements that this rank has a copy of, because somebody wrote in them."""
        size = self._dtype.itemsize
        return [(start // size, -(-stop // size)) for start, stop in self._private.written()]

    def drop(self) -> None:
        """The view shows what everybody sees."""
        self._private.drop()

    def replace_view(self) -> PrivateView:
        """Takes another view, without copies, and returns the one that was used so far."""
        before, self._private = self._private, self._private.another()
        self.view = self._typed(self._private.memory)
        return before
