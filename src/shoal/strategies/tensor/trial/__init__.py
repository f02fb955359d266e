"""Trials of blocks: whether the parts of a split give what the whole gives.

`split_trial` compares, `trial_run` runs a block as one process or as one rank would, `trial_call`
has the inputs and modes that a block is called with, `watching` notices reads of weights.
"""
