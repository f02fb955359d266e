"""What the ranks of an elastic run are told of their place."""

from __future__ import annotations

import pytest

from shoal.launch.joining.process_membership import place_variables

HOSTS = (b"a", b"a", b"b", b"a", b"b")


@pytest.mark.parametrize(
    ("rank", "local"), [(0, "0 of 3"), (1, "1 of 3"), (2, "0 of 2"), (3, "2 of 3"), (4, "1 of 2")]
)
def test_local_ranks_count_those_of_the_own_host(rank: int, local: str) -> None:
    found = place_variables(rank, HOSTS)
    assert (found["RANK"], found["WORLD_SIZE"]) == (str(rank), "5")
    assert f"{found['LOCAL_RANK']} of {found['LOCAL_WORLD_SIZE']}" == local
