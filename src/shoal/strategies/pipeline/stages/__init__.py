"""How a model is cut into stages, and what a rank holds of it."""
