"""How a model is cut into units, chunks and stages, and which rank has which parameters."""
