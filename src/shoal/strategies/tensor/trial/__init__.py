"""Whether a block may be split, found by trying."""
