"""Whether all ranks train alike."""
