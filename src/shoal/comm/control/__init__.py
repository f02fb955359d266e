"""The control plane: how ranks compare what they do, and learn which of them failed or left."""
