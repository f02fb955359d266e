"""Runs the tests that depend most on torch: to try another version of it in some minutes.

Usage: python tools/torch_tests.py [OPTIONS OF PYTEST]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
# Files are found by name, wherever they are. Where private names of torch are used comes first.
NAMES = (
    # parameters and gradients: hooks, version counters, storages, dispatch, saved tensors
    *("test_access", "test_changes", "test_sharded_gradients", "test_roster", "test_graphs"),
    *("test_compiled", "test_batch_norm", "test_precision", "test_scaler"),
    # optimizers: the proof reads what a step does, operator by operator
    *("test_rules", "test_kinds", "test_watching", "test_identity", "test_kernels"),
    # strategies against one process
    *("test_pairs", "test_layers", "test_hooks", "test_unusual_modules", "test_split_backward"),
    *("test_hybrid", "test_past_mistakes"),
    # communication and checkpoints
    *(
        "test_collectives",
        "test_differentiable",
        "test_private_view",
        "test_matrix",
        "test_plain_files",
    ),
)
CHOICE = "not full and not mpi and not slow and not root"


def files() -> list[str]:
    """The test files of these names; each name must have one."""
    found = {name: sorted(map(str, TESTS.rglob(f"{name}.py"))) for name in NAMES}
    missing = [name for name, paths in found.items() if not paths]
    if missing:
        sys.exit(f"no such files below {TESTS}: {', '.join(missing)}; see NAMES in {__file__}")
    return [path for paths in found.values() for path in paths]


def main(options: list[str]) -> int:
    """Returns pytest's exit code."""
    import torch

    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", "-q", "-m", CHOICE, *files(), *options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
