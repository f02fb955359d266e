"""Who else holds parameters of a model of which these ranks have a part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.comm import Backend


@dataclass(frozen=True)
class Holders:
    """Who else holds parameters of the same model, beyond the ranks that see other data.

    Attributes:
        axes: Groups of ranks that hold other layers, or other parts of the same layers.
        copies: How many ranks over these axes hold the same elements of a parameter, by its name;
            one where it is not named.
        other_layers: That of the axes whose ranks hold other layers, if there is one.
    """

    axes: tuple[Backend, ...] = ()
    copies: Mapping[str, int] = field(default_factory=dict)
    other_layers: Backend | None = None
