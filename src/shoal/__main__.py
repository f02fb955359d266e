"""`python -m shoal`, where the `shoal` command is not on the path."""

from __future__ import annotations

from shoal.cli import main

if __name__ == "__main__":
    main()
