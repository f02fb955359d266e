"""Gradients that travel as payloads: `exchange.py` first, then `plan.py` and `residual.py`."""
