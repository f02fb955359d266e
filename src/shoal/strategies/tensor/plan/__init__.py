"""Which layers are split, and how: found by `draft`, or as the user describes it (`user_plan`).

A *candidate* is a block that might be split, a *proposal* one way to do it, a *verdict* a proposal
that is right, with what a trial found out.
"""
