"""What models, optimizers and generators have to save."""
