"""What cannot be launched is refused, with a way out."""

import pytest

from shoal.errors import LaunchError
from shoal.launch.script.config import elastic_bounds
from shoal.launch.script.launcher import LaunchConfig, launch
from shoal.meeting.elastic_options import Elastic


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
        ({"ranks": 2, "elastic": Elastic(min_ranks=3)}, "-n 2 --min 3"),
        ({"ranks": 2, "elastic": Elastic(min_ranks=0)}, "1 or more.*--min 0"),
        ({"ranks": 4, "elastic": Elastic(max_ranks=3)}, "-n 4 --min 1 --max 3"),
        ({"elastic": Elastic(spares=-1)}, "--spares.*-1"),
        ({"elastic": Elastic(restarts=-1)}, "--restarts.*-1"),
        ({"elastic": Elastic(), "nodes": 2, "master": "a:1"}, "shoal launch --join"),
        ({"elastic": Elastic(), "backend": "nccl"}, "shm or gloo or mpi, but --backend is nccl"),
        ({"elastic": Elastic(spares=1), "backend": "mpi"}, "can go and not come.*--spares"),
        ({"elastic": Elastic(max_ranks=9), "backend": "mpi"}, "a --max above -n"),
        ({"elastic": Elastic(), "backend": "shm", "master": "a:1"}, "between hosts.*over gloo"),
        ({"elastic": Elastic(), "master": "a:0"}, "port from 1"),
        ({"join": "localhost"}, "--join must be HOST:PORT"),
        ({"join": "localhost:5", "elastic": Elastic()}, "leave out --elastic"),
        ({"join": "localhost:5", "backend": "gloo"}, "leave out.*--backend"),
    ],
)
def test_what_cannot_run_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        LaunchConfig("train.py", **options)


def test_bounds_are_for_elastic_runs_only() -> None:
    assert elastic_bounds(False, None, None, None, None) is None
    for number in range(4):
        given = [1 if number == each else None for each in range(4)]
        with pytest.raises(LaunchError, match="--elastic: add it"):
            elastic_bounds(False, *given)


def test_an_elastic_run_that_others_may_join_is_over_gloo() -> None:
    config = LaunchConfig("x.py", elastic=Elastic(), master="10.0.0.1:5")
    assert (config.is_between_hosts, config.backend) == (True, "gloo")
    config = LaunchConfig("x.py", elastic=Elastic(), master="localhost:5")
    assert (config.is_between_hosts, config.backend) == (False, None)


def test_where_a_run_is_joined() -> None:
    assert LaunchConfig("x.py", join="10.0.0.1:5").run_address == "tcp:10.0.0.1:5"
    names = {LaunchConfig("x.py", join=f"{host}:5").run_address for host in LOOPBACKS}
    assert len(names) == 1
    assert names.pop().startswith("unix:")


LOOPBACKS = ("localhost", "127.0.0.1", "[::1]")


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
