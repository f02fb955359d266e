"""Where ranks meet: what an open store may say of it, and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch.distributed as dist

from shoal.errors import DeadlineError, LaunchError
from shoal.launch.joining import meet
from shoal.launch.joining.environment import RankInfo
from shoal.meeting.handshake import TOKEN_VARIABLE

INFO = RankInfo(1, 2, 0, 1, 1, "10.0.0.1", 29500, "torchrun")
HERE = "tcp:10.0.0.1:4000"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setenv(TOKEN_VARIABLE, "the token")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run 7")
    return dist.HashStore()


def test_what_rank_0_published_is_found(store: dist.Store) -> None:
    meet._publish(store, HERE, 1)
    assert meet._published(store, INFO, 1, 5.0) == HERE


def test_nothing_published_names_rank_0(store: dist.Store) -> None:
    with pytest.raises(DeadlineError, match="rank 1 waits for rank 0 of 2 to join"):
        meet._published(store, INFO, 1, 0.2)


def overwrite(store: dist.Store) -> None:
    store.set(meet._key(1), json.dumps(["tcp:10.6.6.6:1", "00" * 32]))


def write_garbage(store: dist.Store) -> None:
    store.set(meet._key(1), "no address")


def write_too_much(store: dist.Store) -> None:
    store.set(meet._key(1), json.dumps([HERE, "ü", {}]))


def keep_the_signature(store: dist.Store) -> None:
    _, signature = json.loads(store.get(meet._key(1)))
    store.set(meet._key(1), json.dumps(["tcp:10.6.6.6:1", signature]))


def replay_another_world(store: dist.Store) -> None:
    meet._publish(store, "tcp:10.0.0.1:4001", 2)
    store.set(meet._key(1), store.get(meet._key(2)).decode())


@pytest.mark.parametrize(
    "forge",
    [overwrite, write_garbage, write_too_much, keep_the_signature, replay_another_world],
)
def test_what_a_stranger_wrote_is_refused(store: dist.Store, forge) -> None:
    meet._publish(store, HERE, 1)
    forge(store)
    with pytest.raises(LaunchError, match="not signed with this rank's SHOAL_TOKEN"):
        meet._published(store, INFO, 1, 5.0)


def test_another_run_or_token_signs_otherwise(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = meet._key(1)
    signature = meet._signature(key, HERE)
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    assert meet._signature(key, HERE) != signature
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run 8")
    assert meet._key(1) != key


@pytest.mark.skipif(sys.platform != "linux", reason="names of sockets are files there")
def test_a_second_process_of_one_rank_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_MEETING", raising=False)
    info = RankInfo(1, 2, 1, 2, 0, "127.0.0.1", 29_999, "plain")
    with meet._the_only_one(info, 1):
        with (
            pytest.raises(LaunchError, match=r"rank 1 was started twice.*MASTER_PORT=29999"),
            meet._the_only_one(info, 1),
        ):
            pass
        with meet._the_only_one(replace(info, rank=2), 1), meet._the_only_one(info, 2):
            pass
    with meet._the_only_one(info, 1):
        pass
