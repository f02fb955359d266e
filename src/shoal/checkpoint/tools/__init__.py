"""Checkpoints by themselves, without a model: converted, inspected."""
