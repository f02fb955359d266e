"""The optimizers of replicas that are trained independently, and what brings them together."""
