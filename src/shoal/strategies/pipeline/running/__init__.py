"""A batch on its way through the stages."""
