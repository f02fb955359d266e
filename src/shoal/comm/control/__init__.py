"""The control plane: how ranks agree on what they do, and learn of each other's fate."""
