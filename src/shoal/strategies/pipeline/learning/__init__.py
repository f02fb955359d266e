"""How ranks find out which values travel between the parts of a model."""
