"""An elastic run that another launcher holds, as the one sees it whose workers join."""

from __future__ import annotations

import math
import time
from typing import Any

from shoal.errors import LaunchError, ShoalError
from shoal.launch.script.config import LaunchConfig
from shoal.launch.script.meeting_place import MeetingPlace
from shoal.meeting.address import host_and_port
from shoal.meeting.client import MeetingClient, MeetingGone, NotThereYet
from shoal.meeting.handshake import TOKEN_VARIABLE
from shoal.meeting.silence import silence_s

_ANSWER_S = 10.0


class JoinedRun(MeetingPlace):
    """A connection to the holder. It lasts as long as the launcher: its end is that of the workers.

    Attributes:
        variables: What the workers of the run have in common.
        is_cut_off: Whether the holder is on another host, and has been silent for too long.
    """

    def __init__(self, config: LaunchConfig) -> None:
        """Connects, or says why not."""
        self._config, self._server = config, None
        self.address, self._name = config.run_address, config.join
        self.master_host, self.master_port = config.host, config.port
        self.variables: dict[str, str] = {}
        self.is_cut_off = False
        # See [Note: launchers that are cut off]. On one host the kernel tells of an end.
        self._patience_s = math.inf if host_and_port(self.address) is None else silence_s() / 2
        self._told_at, self._heard_at = 0.0, time.monotonic()
        try:
            self._client = MeetingClient(self.address)
        except (NotThereYet, MeetingGone) as error:
            raise LaunchError(self._absence(error)) from None

    def __exit__(self, *exc_info: object) -> None:
        """Hangs up."""
        self._client.close()

    def expect(self) -> int:
        """The number of one more worker."""
        try:
            self._client.tell({"kind": "expect"})
            answer = self._answer("person")
        except MeetingGone as error:
            raise LaunchError(
                f"The run at {self._name} does not let ranks join: it is not elastic, or has just "
                f"ended ({error})"
            ) from None
        self.variables = {str(name): str(value) for name, value in answer["variables"].items()}
        return int(answer["person"])

    def note_end(self, number: int, reason: str, *, is_good: bool) -> bool:
        """Tells of a worker's end; whether it ever was a member, as far as that is known."""
        try:
            message = {"person": number, "reason": reason, "is_good": is_good}
            self._client.tell({"kind": "person-ended", **message})
            return bool(self._answer("was_member")["was_member"])
        except ShoalError:
            return True

    def is_there(self) -> bool:
        """Whether the holder still is; to be asked again and again."""
        now = time.monotonic()
        try:
            if now - self._told_at >= self._patience_s / 8:
                self._told_at = now
                self._client.tell({"kind": "beat"})
            while self._client.poll("beat") is not None:
                self._heard_at = now
        except MeetingGone:
            return False
        self.is_cut_off = now - self._heard_at >= self._patience_s
        return not self.is_cut_off

    def _answer(self, key: str) -> dict[str, Any]:
        answer: dict[str, Any] | None = self._client.reply(_ANSWER_S, key)
        if answer is None:
            raise LaunchError(f"the launcher of the run at {self._name} does not answer")
        return answer

    def _absence(self, error: Exception) -> str:
        if host_and_port(self.address) is None:
            return (
                f"There is no elastic run of yours at {self._name}. Only the user who started it "
                "can join one on this host, by the address that its launcher has printed."
            )
        return (
            f"The elastic run at {self._name} cannot be joined: {error}. Check that it was started "
            f"with --elastic --master {self._name}, and that {TOKEN_VARIABLE} is the same here."
        )
