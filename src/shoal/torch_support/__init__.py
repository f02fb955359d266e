"""What all other packages need of torch: dtypes, bytes, random state, fingerprints, threads."""
