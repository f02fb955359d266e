"""Gradients: collected, averaged, shown to users and taken back from them."""
