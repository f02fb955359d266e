"""Blocks whose activations are dropped in forward, or kept elsewhere, and got back in backward."""
