"""What the tests of elastic training need is what those of strategies do."""

from __future__ import annotations

from strategies.conftest import first_use, one_thread, pools_end

__all__ = ["first_use", "one_thread", "pools_end"]
