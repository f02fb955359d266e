"""What cannot be launched is refused, with a way out."""

import pytest

from shoal.errors import LaunchError
from shoal.launch.script.launcher import LaunchConfig, launch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "At least one rank.*-n 1"),
        ({"ranks": -2}, "At least one rank.*-2"),
        ({"nodes": 0}, "At least one node"),
        ({"nodes": 2}, "no master was given.*--master HOST:PORT"),
        ({"node_rank": 1}, "from 0 to 0.*is 1"),
        ({"nodes": 2, "node_rank": -1, "master": "a:1"}, "from 0 to 1.*is -1"),
        ({"master": "nohost"}, "HOST:PORT.*'nohost'"),
        ({"master": ":29500"}, "HOST:PORT"),
        ({"master": "a:b"}, "HOST:PORT"),
        ({"master": "a:65536"}, "HOST:PORT"),
        ({"nodes": 2, "master": "a:0"}, "port from 1"),
        ({"backend": "memory"}, "threads of one process.*shoal.run"),
        ({"backend": "gluon"}, "one of auto.*'gluon'"),
        ({"backend": "mpi", "nodes": 2, "master": "a:1"}, "mpirun or srun"),
        ({"grace": -1.0}, "0 seconds or more"),
    ],
)
def test_what_cannot_run_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        LaunchConfig("train.py", **options)


def test_an_ipv6_master_is_understood() -> None:
    config = LaunchConfig("x.py", nodes=2, master="[fe80::1]:29500")
    assert (config.host, config.port) == ("fe80::1", 29500)


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("missing.py", False, "must exist.*'missing.py'"),
        (".", False, "is a directory"),
        ("no_such_module_anywhere", True, "must be importable"),
    ],
)
def test_a_missing_script_is_refused(name: str, module: bool, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launch(LaunchConfig(name, module=module))
