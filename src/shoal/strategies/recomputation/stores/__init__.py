"""Where what blocks keep for backward lies: a store for each place."""
