"""What is trained and compared: one process, and the ranks."""
