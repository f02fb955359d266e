"""How the ticks of a batch are run: messages, backward, losses and results."""
