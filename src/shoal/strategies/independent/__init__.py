"""Models of which every rank trains a replica of its own: ranks meet rarely, or never."""
