"""Gradients of which each rank holds a part, as tensors."""
