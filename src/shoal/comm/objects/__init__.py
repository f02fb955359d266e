"""Objects that ranks send each other: as bytes, and with a proof where reading runs code."""
