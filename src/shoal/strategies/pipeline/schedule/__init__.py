"""Which rank works on which micro-batch when. Pure."""
