"""Which rank is this process, and how it joins and leaves its world."""
