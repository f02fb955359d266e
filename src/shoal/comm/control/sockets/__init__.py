"""The control plane between hosts: a socket between each two ranks."""
