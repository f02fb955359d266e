"""How often, how much and how long: operations, and memory."""
