"""Everything private of torch that shoal uses, each name once, behind a word that says what for.

Look here when another version of torch breaks something: `tests/torch_internals` says which name
no longer does what is needed. Nothing else in the package may use a private name of torch.
"""
