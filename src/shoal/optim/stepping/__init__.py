"""How a step is taken: by which kernel, with which random numbers and hooks, watched or not."""
