"""How ranks find each other; from the name of a backend to a backend."""
