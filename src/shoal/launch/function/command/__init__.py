"""Ranks that another command starts, for one function."""
