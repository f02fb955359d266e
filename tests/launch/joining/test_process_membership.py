"""What a process of an elastic run hears of the holder, told without one."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal.errors import DeadlineError
from shoal.launch.joining.process_membership import ProcessMembership

TIMEOUT_S = 0.02


class Holder:
    """Says what it is told to, and nothing where that is None."""

    def __init__(self, *answers: dict[str, Any] | None) -> None:
        self.answers = list(answers)

    def tell(self, message: dict[str, Any]) -> None:
        pass

    def reply(self, *_: Any) -> None:
        return None

    def reply_of(self, *_: Any) -> dict[str, Any] | None:
        answer = self.answers.pop(0)
        if answer is None:
            time.sleep(2 * TIMEOUT_S)
        return answer


def member(*answers: dict[str, Any] | None) -> Any:
    membership: Any = ProcessMembership.__new__(ProcessMembership)
    membership.generation, membership.is_leaving = 3, False
    membership._timeout, membership._client = TIMEOUT_S, Holder(*answers)
    return membership


def test_a_member_does_not_wait_for_ever() -> None:
    with pytest.raises(DeadlineError):
        member(None, None)._await_world()


def test_one_that_is_set_aside_waits_as_long_as_the_run_lasts() -> None:
    waiting, world = member({"aside": True}, None, None, {"world": {}}), {"world": {}}
    assert waiting._await_world() == world
    assert waiting.generation == 0  # as for any that waits
