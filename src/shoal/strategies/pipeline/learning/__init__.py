"""How one chunk of a model runs, and how ranks learn which values travel between chunks."""
