"""Optimizers whose kind is known, because their source was read.

Those of torch are checked against the proof by tests, those of other packages by training with
them. They are not watched while they step, which makes them faster than the rest.
"""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

from shoal.optim.kinds import Kind
from shoal.optim.proof.judgement import Judgement

_OF_TORCH: dict[type[Optimizer], Kind] = {
    **dict.fromkeys(
        [
            optim.SGD, optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax,
            optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop,
        ],
        Kind.ELEMENT_WISE,
    ),
    # Both look at numbers of the parameter that they step, and at no other.
    optim.Adafactor: Kind.PER_PARAMETER,
    optim.Muon: Kind.PER_PARAMETER,
    optim.LBFGS: Kind.GLOBAL,
    optim.SparseAdam: Kind.GLOBAL,
}  # fmt: skip

_OF_OTHERS: dict[str, Kind] = dict.fromkeys(
    [
        "pytorch_optimizer.optimizer.adamp.AdamP",
        "pytorch_optimizer.optimizer.adamp.SGDP",
        "pytorch_optimizer.optimizer.adanorm.AdaNorm",
        "pytorch_optimizer.optimizer.fromage.Fromage",
        "pytorch_optimizer.optimizer.lars.LARS",
        "timm.optim.adamp.AdamP",
        "timm.optim.mars.Mars",
        "timm.optim.nvnovograd.NvNovoGrad",
        "timm.optim.sgdp.SGDP",
    ],
    Kind.PER_PARAMETER,
)
"""By module and class. A proof can only find them global.

They decide by a number of the parameter they step, or compute numbers of all in one tensor, each at
its own index.
"""


def look_up(optimizer: Optimizer) -> Judgement | None:
    """What is known of an optimizer of exactly this class; a subclass may compute anything."""
    made = type(optimizer)
    if made in _OF_TORCH:
        return Judgement(_OF_TORCH[made], f"torch's own {made.__name__}")
    name = f"{made.__module__}.{made.__qualname__}"
    if name in _OF_OTHERS:
        return Judgement(_OF_OTHERS[name], f"known from the source of {name}")
    return None
