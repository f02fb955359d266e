"""From the files of a checkpoint to what each rank needs."""
