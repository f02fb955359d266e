"""State on disk: one format for every strategy and every number of ranks."""

from shoal.checkpoint.loading import Loaded, load
from shoal.checkpoint.saving import save
from shoal.checkpoint.together import PendingSave

__all__ = ["Loaded", "PendingSave", "load", "save"]
