"""Where ranks meet before there is a world: a server of ours, and what proves who is there."""
