"""Which layers are split, and how: found, or as the user describes it.

To read, in this order: `tensor_plan` (the result) and `cut` (how one dimension is shared out);
`draft` (finds a plan) with `candidates` (blocks that might be split, by `known_names`, by sizes or
by what the model says of itself), `proposals` (ways to split a candidate), `verdict` (whether one
is right), `vocabulary` (embeddings and heads) and `source_code` (reasons not to split); `splits`
(from layers to parameters); `user_plan` (a plan from patterns of names).

A *candidate* is a block that might be split, a *proposal* one way to do it, a *verdict* a proposal
that is right, with what a trial found out.
"""
