"""From what each rank has to the files of one checkpoint."""
