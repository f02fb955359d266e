"""Processes that start in milliseconds."""
