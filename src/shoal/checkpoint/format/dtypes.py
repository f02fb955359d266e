"""What dtypes are called in files: by torch in manifests, by safetensors in headers."""

from __future__ import annotations

import torch

CODES: dict[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""Those that safetensors knows; the rest are written as bytes."""

_ONLY_OURS = ("complex128", "complex32", "float8_e8m0fnu")
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in (*CODES, *_ONLY_OURS)}
_BY_CODE = {code: _DTYPES[name] for name, code in CODES.items()}
BYTES_CODE = "U8"


def dtype_name(dtype: torch.dtype, what: str = "a tensor") -> str:
    """The name, if files can hold such numbers."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"{what} is of {dtype}, which cannot be saved: convert it to another dtype")
    return name


def dtype_called(name: object) -> torch.dtype:
    """The dtype of a name in a manifest."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{str(name)[:50]!r} is no dtype")
    return _DTYPES[name]


def dtype_of_code(code: object) -> torch.dtype:
    """The dtype of a code in a safetensors header."""
    if not isinstance(code, str) or code not in _BY_CODE:
        raise ValueError(f"{str(code)[:50]!r} is no dtype of safetensors")
    return _BY_CODE[code]


def code_of(dtype: torch.dtype) -> str:
    """What a header says of such a tensor."""
    return CODES.get(dtype_name(dtype), BYTES_CODE)
