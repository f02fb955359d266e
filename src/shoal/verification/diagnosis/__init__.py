"""Why training differs."""
