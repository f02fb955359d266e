"""`shoal demo`: training under every strategy, and a tour of the collectives."""
