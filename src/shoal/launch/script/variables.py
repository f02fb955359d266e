"""The variables each rank is started with: what `shoal.launch.joining.environment` reads back.

They carry torchrun's names, so that a script written for torchrun runs as it is.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from shoal.launch.rank_settings import rank_settings
from shoal.launch.script.config import LaunchConfig


def common_variables(
    config: LaunchConfig, port: int, error_dir: Path, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What all ranks of this node share; what the user exported about threads is kept."""
    run_id = env.get("SHOAL_RUN_ID") or _run_id(config, port)
    variables = {
        "WORLD_SIZE": str(config.size),
        "LOCAL_WORLD_SIZE": str(config.ranks),
        "GROUP_RANK": str(config.node_rank),
        "GROUP_WORLD_SIZE": str(config.nodes),
        "MASTER_ADDR": config.host,
        "MASTER_PORT": str(port),
        "SHOAL_LAUNCHED": "1",
        "SHOAL_RUN_ID": run_id,
        "SHOAL_ERROR_DIR": str(error_dir),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # The launcher has the store; without this, rank 0 of torch would try to host another.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONUNBUFFERED": "1",
        **rank_settings(config.ranks, env),
    }
    if config.backend is not None:
        variables["SHOAL_BACKEND"] = config.backend
    token = _token(config, env)
    return variables if token is None else {**variables, "SHOAL_TOKEN": token}


def own_variables(config: LaunchConfig, local_rank: int) -> dict[str, str]:
    """What tells one rank from its neighbours."""
    return {"RANK": str(config.first_rank + local_rank), "LOCAL_RANK": str(local_rank)}


def _run_id(config: LaunchConfig, port: int) -> str:
    """Unique on one node; on several, all launchers must arrive at the same without talking."""
    return secrets.token_hex(8) if config.nodes == 1 else f"{config.host}-{port}"


def _token(config: LaunchConfig, env: Mapping[str, str]) -> str | None:
    """A secret of this run. Launchers of several nodes share only one that the user exported."""
    exported = env.get("SHOAL_TOKEN")
    return exported or (secrets.token_hex(16) if config.nodes == 1 else None)
