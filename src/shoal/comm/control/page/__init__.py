"""The control plane between ranks of one host: a page of memory that all of them map."""
