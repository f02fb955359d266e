"""Rank discovery: every launcher's variables, and every way in which they can be wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LaunchError
from shoal.launch.joining.environment import (
    ALONE,
    RankInfo,
    discover,
    expand_counts,
    first_host,
    without_rank,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SHOAL = {**TORCHRUN, "SHOAL_LAUNCHED": "1"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[03-05]",
    "SLURM_JOB_NODELIST": "node[01-09]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
BATCH_BODY = {
    "ENVIRONMENT": "BATCH",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[03-04]",
}
PLAIN = {"RANK": "1", "WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ALONE),
        ({"MASTER_ADDR": "10.0.0.1", "PATH": "/bin"}, ALONE),
        (SHOAL, RankInfo(5, 8, 1, 4, 1, "10.0.0.1", 29500, "shoal")),
        (TORCHRUN, RankInfo(5, 8, 1, 4, 1, "10.0.0.1", 29500, "torchrun")),
        (OPENMPI, RankInfo(3, 4, 1, 2, 1, None, None, "openmpi")),
        (PMI, RankInfo(3, 4, 1, 2, 1, None, None, "pmi")),
        (SLURM, RankInfo(4, 5, 0, 1, 2, "node03", 15000 + 31 * 77, "slurm")),
        (BATCH_BODY, ALONE),
        (PLAIN, RankInfo(1, 2, 1, 2, 0, None, None, "plain")),
        ({**PLAIN, **MASTER}, RankInfo(1, 2, 0, 1, 1, "10.0.0.1", 29500, "plain")),
        (
            {**PLAIN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            RankInfo(1, 2, 1, 2, 0, "127.0.0.1", 1, "plain"),
        ),
    ],
    ids=lambda value: value.source if isinstance(value, RankInfo) else "",
)
def test_each_launcher_is_understood(env: dict[str, str], expected: RankInfo) -> None:
    assert discover(env) == expected


@pytest.mark.parametrize(
    ("env", "source"),
    [
        ({**SLURM, **TORCHRUN}, "torchrun"),
        ({**OPENMPI, **TORCHRUN}, "torchrun"),
        ({**OPENMPI, **SHOAL}, "shoal"),
        ({**SLURM, **OPENMPI}, "openmpi"),
        ({**SLURM, **PMI}, "pmi"),
        ({**BATCH_BODY, **OPENMPI}, "openmpi"),
        ({**BATCH_BODY, **PLAIN}, "plain"),
        ({**OPENMPI, "RANK": "3", "WORLD_SIZE": "4"}, "openmpi"),
    ],
)
def test_the_innermost_launcher_counts(env: dict[str, str], source: str) -> None:
    assert discover(env).source == source


@pytest.mark.parametrize("step", ["4294967291", "4294967290", "4294967292", "batch", "extern"])
def test_a_slurm_step_that_srun_did_not_start_is_alone(step: str) -> None:
    assert discover({**BATCH_BODY, "SLURM_STEP_ID": step}) == ALONE


def test_srun_inside_a_batch_script_is_a_task() -> None:
    info = discover({**BATCH_BODY, **SLURM})
    assert (info.rank, info.size, info.source) == (4, 5, "slurm")


def test_srun_with_pmi2_takes_local_numbers_from_slurm() -> None:
    env = {**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"}
    info = discover(env)
    assert (info.rank, info.size, info.local_rank, info.local_size) == (4, 5, 0, 1)
    assert (info.master_addr, info.source) == ("node03", "pmi")


def test_few_slurm_variables_are_enough_on_one_host() -> None:
    env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
    assert discover(env) == RankInfo(1, 2, 1, 2, 0, None, None, "slurm")
    named = {**env, "SLURM_JOB_NODELIST": "node7", "SLURM_JOB_ID": "3"}
    assert discover(named) == RankInfo(1, 2, 1, 2, 0, "node7", 15093, "slurm")


def test_a_master_the_user_names_goes_before_slurms() -> None:
    info = discover({**SLURM, **MASTER})
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 29500)


def test_ranks_of_one_slurm_step_agree_on_the_port_and_two_steps_do_not() -> None:
    ports = [discover({**SLURM, "SLURM_STEP_ID": step}).master_port for step in ("0", "0", "1")]
    assert ports[0] == ports[1] != ports[2]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "2"}, ["RANK must be set", "unset RANK, WORLD_SIZE"]),
        ({"RANK": "0"}, ["WORLD_SIZE must be set"]),
        ({"RANK": "", "WORLD_SIZE": "2"}, ["RANK must be set"]),
        ({"LOCAL_RANK": "3"}, ["WORLD_SIZE must be set"]),
        ({**PLAIN, "MASTER_ADDR": "a"}, ["MASTER_PORT must be set"]),
        ({**PLAIN, "MASTER_PORT": "1"}, ["MASTER_ADDR must be set"]),
        ({**PLAIN, **MASTER, "MASTER_PORT": "0"}, ["MASTER_PORT", "1 to 65535", "'0'"]),
        ({**PLAIN, **MASTER, "LOCAL_RANK": "0"}, ["LOCAL_WORLD_SIZE must be set"]),
        ({**PLAIN, "RANK": "2"}, ["RANK", "from 0 to 1", "'2'"]),
        ({**PLAIN, "RANK": "-1"}, ["RANK", "'-1'"]),
        ({**PLAIN, "WORLD_SIZE": "0"}, ["WORLD_SIZE", "'0'"]),
        ({**PLAIN, "RANK": "one"}, ["RANK", "'one'"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK", "from 0 to 3", "'4'"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE", "from 1 to 8", "'9'"]),
        ({**SHOAL, "MASTER_ADDR": ""}, ["MASTER_ADDR must be set", "SHOAL_LAUNCHED"]),
        ({**SHOAL, "GROUP_RANK": ""}, ["GROUP_RANK must be set"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE must be set"]),
        ({"PMI_SIZE": "2"}, ["PMI_RANK must be set"]),
        ({**OPENMPI, "RANK": "0"}, ["RANK=0", "OMPI_COMM_WORLD_RANK=3", "Unset RANK"]),
        ({**PMI, "WORLD_SIZE": "1"}, ["WORLD_SIZE=1", "PMI_SIZE=4"]),
        ({**SLURM, "SLURM_NODEID": "3"}, ["SLURM_NODEID", "3 nodes", "'3'"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2x2"}, ["'2(x2),1'", "'2x2'"]),
    ],
)
def test_nonsense_is_refused_by_name_and_with_a_way_out(
    env: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        discover(env)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[03-05,9]", "node03"),
        ("node[7]", "node7"),
        ("rack[2-4]-node[03-05,9],login", "rack2-node03"),
        ("gpu[1,3]-ib.cluster.org,x", "gpu1-ib.cluster.org"),
    ],
)
def test_first_host_of_a_slurm_list(text: str, host: str) -> None:
    assert first_host(text) == host


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1, max_size=5))
def test_slurm_counts_are_written_out(runs: list[tuple[int, int]]) -> None:
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
    assert expand_counts(text) == [count for count, times in runs for _ in range(times)]


@given(st.integers(1, 64), st.data())
def test_every_rank_of_a_plain_world_is_found(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    info = discover({"RANK": str(rank), "WORLD_SIZE": str(size)})
    assert (info.rank, info.size, info.local_rank, info.local_size) == (rank, size, rank, size)


def test_a_launcher_inside_of_a_rank_starts_afresh() -> None:
    ranks = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1",
        "SHOAL_LAUNCHED": "1", "SHOAL_MEETING": "unix:@x", "TORCHELASTIC_RUN_ID": "r",
        "OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "n", "PMI_RANK": "1",
    }  # fmt: skip
    kept = {"PATH": "/bin", "OMPI_MCA_btl": "self", "PMIX_MCA_gds": "hash", "SLURM_NTASKS": "2"}
    assert without_rank({**ranks, **kept}) == kept
    assert discover(without_rank(ranks)) == ALONE
