"""What is asked of the operating system and of Python itself; imports no torch."""
