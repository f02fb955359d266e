"""The state of optimizers: whole, in parts, fresh or loaded."""
