"""How ranks find each other, and get a backend."""
