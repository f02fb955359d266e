"""The backend over MPI."""
