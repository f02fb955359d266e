"""The sentence with which a test of torch's private names fails."""

from __future__ import annotations

import torch


def needs(what: str) -> str:
    return f"torch {torch.__version__} is not what shoal needs: {what}"
