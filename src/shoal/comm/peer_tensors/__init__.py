"""Tensors that other ranks read at any time, without the holder's own code taking part."""
