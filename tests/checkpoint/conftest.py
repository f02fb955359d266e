"""Checkpoints are tested with small models and pools of ranks, as strategies are."""

from strategies.conftest import first_use, one_thread, pools_end

__all__ = ["first_use", "one_thread", "pools_end"]
