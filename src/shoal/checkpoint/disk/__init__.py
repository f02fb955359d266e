"""What checkpoints do to a disk."""
