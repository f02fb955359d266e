"""`shoal launch`: a script on many ranks, watched to the end. Imports no torch."""
