"""What `parameters()` has while the model's own forward or a loss runs: those of all ranks.

A penalty over all weights, or a look at the dtype of the first, means the whole model. Optimizers,
clipping and states ask outside of them, and mean this rank's. Parameters of other ranks are absent
values, or borrowed if their numbers were wanted when the way through the model was learned. Losses
are not learned: one that wants them ends in an error, and not in the sum of one rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import Tensor, nn

from shoal.strategies.pipeline.learning.chunk_forward import Path
from shoal.strategies.pipeline.stages.stage_parameters import StageParameters


def list_all_in_users_code(model: nn.Module, parameters: StageParameters, path: Path) -> None:
    """From now on all parts of the model list all parameters where the user's code asks."""
    listing = _listing(parameters, path)
    for part in model.modules():
        # A method, and no function that knows the module: copies of a part list their own.
        vars(part)["named_parameters"] = MethodType(listing, part)


def _listing(
    parameters: StageParameters, path: Path
) -> Callable[..., Iterator[tuple[str, Tensor]]]:
    def named_parameters(
        module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        if path.is_in_users_code:
            yield from module._named_members(
                parameters.shown_in, prefix, recurse, remove_duplicate=remove_duplicate
            )
        else:
            yield from type(module).named_parameters(module, prefix, recurse, remove_duplicate)

    return named_parameters
