"""The name of torch's compiler, to ask whether it is loaded without loading it or torch."""

COMPILER = "torch._dynamo"
"""torch imports it with the first optimizer of a process, which takes a second."""
