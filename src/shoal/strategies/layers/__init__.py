"""What strategies change about layers: batch norm, buffers, precision, meta devices."""
