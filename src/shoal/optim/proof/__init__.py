"""What an optimizer may be divided into, proved by following the data through its steps."""
