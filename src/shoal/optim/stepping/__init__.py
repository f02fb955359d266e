"""How a step is taken: on which memory, by which kernel, watched or not."""
