"""The one table of dtypes: what each is called, and who can compute with it.

A dtype that torch gains needs a row here and nothing else. One without a row is refused with an
error that names it, when it is sent as well as when it is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

BYTES_CODE = "U8"
"""What safetensors files say of a tensor whose dtype safetensors does not know: its bytes."""


class Native(Enum):
    """Which reductions of a dtype a library's own arithmetic gets right."""

    NONE = "none"
    SUMS = "sums and products"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class DtypeTraits:
    """One row.

    Attributes:
        dtype: The dtype.
        code: What safetensors calls it; None if it does not know it.
        is_computed: Whether torch can add such numbers, not only store and copy them.
        summed_in: The dtype that more than two of them are added in; rounded once at the end.
        gloo: What Gloo reduces well by itself. It rounds sixteen-bit floats at each hop, and its
            minimum and maximum of floats ignore NaN.
        nccl: What NCCL reduces well by itself.
    """

    dtype: torch.dtype
    code: str | None
    is_computed: bool = True
    summed_in: torch.dtype | None = None
    gloo: Native = Native.NONE
    nccl: Native = Native.NONE

    @property
    def name(self) -> str:
        """As torch has it, without "torch."."""
        return str(self.dtype).removeprefix("torch.")


def _stored(dtype: torch.dtype, code: str | None) -> DtypeTraits:
    return DtypeTraits(dtype, code, is_computed=False)


_SUMS, _ALL = Native.SUMS, Native.ALL
# The index of a row is its number in headers, which ranks tell each other: add rows at the end.
TABLE: tuple[DtypeTraits, ...] = (
    DtypeTraits(torch.float32, "F32", gloo=_SUMS, nccl=_ALL),
    DtypeTraits(torch.float64, "F64", gloo=_SUMS, nccl=_ALL),
    DtypeTraits(torch.float16, "F16", summed_in=torch.float32, nccl=_ALL),
    DtypeTraits(torch.bfloat16, "BF16", summed_in=torch.float32, nccl=_ALL),
    DtypeTraits(torch.int64, "I64", gloo=_ALL, nccl=_ALL),
    DtypeTraits(torch.int32, "I32", gloo=_ALL, nccl=_ALL),
    DtypeTraits(torch.int16, "I16"),
    DtypeTraits(torch.int8, "I8", gloo=_ALL, nccl=_ALL),
    DtypeTraits(torch.uint8, "U8", gloo=_ALL, nccl=_ALL),
    DtypeTraits(torch.bool, "BOOL"),
    DtypeTraits(torch.complex64, "C64"),
    DtypeTraits(torch.complex128, None),
    _stored(torch.float8_e4m3fn, "F8_E4M3"),
    _stored(torch.float8_e5m2, "F8_E5M2"),
    _stored(torch.uint16, "U16"),
    _stored(torch.uint32, "U32"),
    _stored(torch.uint64, "U64"),
    _stored(torch.float8_e4m3fnuz, "F8_E4M3FNUZ"),
    _stored(torch.float8_e5m2fnuz, "F8_E5M2FNUZ"),
    _stored(torch.float8_e8m0fnu, None),
    _stored(torch.complex32, None),
)
_BY_DTYPE = {row.dtype: row for row in TABLE}
_NUMBERS = {row.dtype: number for number, row in enumerate(TABLE)}
_BY_NAME = {row.name: row.dtype for row in TABLE}
_BY_CODE = {row.code: row.dtype for row in TABLE if row.code is not None}
PLAIN = frozenset(
    row.dtype
    for row in TABLE
    if row.is_computed and not row.dtype.is_complex and row.dtype is not torch.bool
)
"""Those that are computed with as they lie in memory, without a conversion."""
SUMMED_IN = {row.dtype: row.summed_in for row in TABLE if row.summed_in is not None}
"""The wider dtypes of those that are summed in one."""


def traits(dtype: torch.dtype) -> DtypeTraits:
    """The row of a dtype; `TypeError` if there is none."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise TypeError(
            f"shoal does not know {dtype}: convert the tensor to another dtype"
        ) from None


def dtype_number(dtype: torch.dtype) -> int:
    """What a header says instead of the dtype."""
    number = _NUMBERS.get(dtype)
    if number is None:
        raise TypeError(f"ranks cannot exchange tensors of {dtype}: convert it to another dtype")
    return number


def dtype_numbered(number: int) -> torch.dtype:
    """The inverse of `dtype_number`."""
    return TABLE[number].dtype


def dtype_name(dtype: torch.dtype, what: str = "a tensor") -> str:
    """What a manifest calls the dtype; ``what`` names the tensor in an error."""
    if dtype not in _BY_DTYPE:
        raise TypeError(f"{what} is of {dtype}, which cannot be saved: convert it to another dtype")
    return _BY_DTYPE[dtype].name


def dtype_called(name: object) -> torch.dtype:
    """The dtype of a name in a manifest."""
    if not isinstance(name, str) or name not in _BY_NAME:
        raise ValueError(f"{str(name)[:50]!r} is no dtype")
    return _BY_NAME[name]


def dtype_of_code(code: object) -> torch.dtype:
    """The dtype of a code in a safetensors header."""
    if not isinstance(code, str) or code not in _BY_CODE:
        raise ValueError(f"{str(code)[:50]!r} is no dtype of safetensors")
    return _BY_CODE[code]


def code_of(dtype: torch.dtype) -> str:
    """What a safetensors header says of a tensor of this dtype."""
    return traits(dtype).code or BYTES_CODE
