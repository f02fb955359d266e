"""What is in the files of a checkpoint. Pure: no files, no models."""
