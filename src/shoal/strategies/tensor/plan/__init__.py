"""What of a model can be split, and how."""
