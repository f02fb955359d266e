"""How a model's parameters are cut into groups and shards. Pure: nothing communicates here."""

from shoal.sharding.analyzer import ParameterAnalyzer, ParameterGroup

__all__ = ["ParameterAnalyzer", "ParameterGroup"]
