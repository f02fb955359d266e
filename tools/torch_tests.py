"""Runs the tests that depend most on torch: to try another version of it in some minutes.

Usage: python tools/torch_tests.py [OPTIONS OF PYTEST]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
# Files and folders below tests. What says by itself what is wrong comes first.
PATHS = (
    *("torch_internals", "torch_support"),
    # parameters and gradients: hooks, version counters, storages, dispatch, saved tensors
    *("strategies/test_model.py", "strategies/engine/test_changes.py"),
    *("strategies/engine/test_admission.py", "strategies/engine/test_roster.py"),
    *("strategies/engine/test_graphs.py", "strategies/engine/test_compiled.py"),
    *("strategies/gradients/sharded", "strategies/layers"),
    # optimizers: the proof reads what a step does, operator by operator
    *("optim/proof", "optim/stepping", "optim/test_kinds.py", "optim/test_parameter_identity.py"),
    *("optim/test_registry.py", "optim/test_scaler.py"),
    # splitting layers and stages
    *("strategies/tensor/layers", "strategies/tensor/plan/test_obstacles.py"),
    *("strategies/tensor/test_split_parameter.py", "strategies/tensor/trial"),
    *("strategies/pipeline/learning", "strategies/pipeline/test_runner.py"),
    *("strategies/pipeline/test_split_backward.py", "strategies/test_hybrid.py"),
    # communication and checkpoints
    *("comm/test_collectives.py", "comm/test_differentiable.py"),
    *("checkpoint/test_matrix.py", "checkpoint/test_plain_files.py"),
)
CHOICE = "not full and not mpi and not slow and not root"


def files() -> list[str]:
    """What is run; all of it must exist."""
    missing = [path for path in PATHS if not (TESTS / path).exists()]
    if missing:
        sys.exit(f"not below {TESTS}: {', '.join(missing)}; see PATHS in {__file__}")
    return [str(TESTS / path) for path in PATHS]


def main(options: list[str]) -> int:
    """Returns pytest's exit code."""
    import torch

    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", "-q", "-m", CHOICE, *files(), *options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
