"""What everybody needs to know of tensors: dtypes, bytes, random state, fingerprints."""
