"""The backend of ranks that are processes of one host."""
