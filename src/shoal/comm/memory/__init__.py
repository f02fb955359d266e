"""The backend of ranks that are threads of one process."""
