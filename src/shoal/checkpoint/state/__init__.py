"""What models, optimizers and their companions have to save."""
