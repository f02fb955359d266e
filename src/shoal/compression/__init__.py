"""Tensors as fewer bytes, and back. Pure: nothing communicates here.

Reading order: `codec.py` (what every codec does), `dense.py`, `sparse.py` and `low_rank.py` (the
codecs), `choosing.py` (another codec for each tensor), `parsing.py` (codecs by name).
"""

from shoal.compression.choosing import Choose
from shoal.compression.codec import Codec, Form
from shoal.compression.codec import CompressedTensor as Payload
from shoal.compression.dense import Cast, Identity, Quantize, Sign
from shoal.compression.low_rank import LowRank
from shoal.compression.parsing import parse
from shoal.compression.sparse import RandomK, TopK

__all__ = [
    "Cast",
    "Choose",
    "Codec",
    "Form",
    "Identity",
    "LowRank",
    "Payload",
    "Quantize",
    "RandomK",
    "Sign",
    "TopK",
    "parse",
]
