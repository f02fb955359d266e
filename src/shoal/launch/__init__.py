"""Starting ranks, finding out which rank a process is, and watching them."""
