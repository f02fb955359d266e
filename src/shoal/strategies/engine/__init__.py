"""The engine of all data-parallel strategies: memory of parameters, and when it is gathered."""
