"""Whether the parts of a split block give what the whole gives, found by trying."""
