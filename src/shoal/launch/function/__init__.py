"""`shoal.run`: one function on many ranks, and its results."""
