"""Work in a GPU's queue: a thread puts it there, and the stream of whoever needs it waits.

[Note: memory on two streams]
An operation in the background reads and writes the caller's memory on a stream of its own. If the
caller let go of that memory before the operation has ended, torch would give it to the next tensor
of the caller's stream. So an operation keeps its memory until somebody has waited for it: from then
on the caller's stream comes after it. One that nobody waits for keeps it until it has ended.

[Note: the host is not far ahead]
A thread that never waits may be a whole pass ahead of its GPU, and what it has begun keeps memory.
So it gives the GPU a moment to catch up. It may not wait for longer: the operation may need another
rank, whose GPU waits for something that this thread has yet to begin. If a moment was not enough
once, later ones are shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.operation import Operation
from shoal.comm.work import ThreadedWork, Work
from shoal.system.deadline import wait_until

_LONGEST_MOMENT_S = 0.1
_POLL_S = 50e-6


class Launched(NamedTuple):
    """What was put into a GPU's queue."""

    result: Any
    end: torch.cuda.Event


class SideStream:
    """A stream for operations in the background, one after the other.

    It begins one where the caller's stream is when it is called, and goes on beside that.
    """

    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        """``check`` raises if what was launched cannot be trusted."""
        self.device, self.check = device, check
        self._stream = torch.cuda.Stream(device)
        self._moment_s = _LONGEST_MOMENT_S
        self._unwaited: set[StreamWork] = set()

    def work(self, operation: Operation, task: Callable[[], Any]) -> StreamWork:
        """For a task that launches an operation, in any thread."""
        begin = torch.cuda.current_stream(self.device).record_event()
        work = StreamWork(partial(self._launch, task, begin), operation, self)
        self._keep(work)
        return work

    def launch(
        self, operation: Operation, task: Callable[[], Any], confirmation: Work[None]
    ) -> ForeseenWork:
        """Launches an operation at once."""
        begin = torch.cuda.current_stream(self.device).record_event()
        work = ForeseenWork(partial(self._launch, task, begin), operation, self, confirmation)
        work.carry_out()
        self._keep(work)
        return work

    def _launch(self, task: Callable[[], Any], begin: torch.cuda.Event) -> Launched:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(begin)
            result = task()
            return Launched(result, self._stream.record_event())

    def _keep(self, work: StreamWork) -> None:
        self._unwaited.difference_update([work for work in self._unwaited if work.is_done()])
        self._unwaited.add(work)

    def await_briefly(self, end: torch.cuda.Event) -> bool:
        """See [Note: the host is not far ahead]."""
        if wait_until(end.query, self._moment_s, poll_s=_POLL_S):
            return True
        self._moment_s /= 4
        return False

    def release(self, work: StreamWork) -> None:
        """Somebody has waited for it."""
        self._unwaited.discard(work)


class StreamWork(ThreadedWork[Any]):
    """An operation that a thread launches. To wait for it is the business of the caller's stream.

    See [Note: memory on two streams].
    """

    def __init__(
        self, launch: Callable[[], Launched], operation: Operation, side: SideStream
    ) -> None:
        """``launch`` puts the operation into the queue of the side stream."""
        super().__init__(launch, operation.signature)
        self._operation: Operation | None = operation
        self._makes_result, self._side = operation.makes_result, side

    def wait(self, timeout: float | None = None) -> Any:
        """Waits on the host until it is launched; what the caller launches next waits for it."""
        result, end = super().wait(timeout)
        self._side.check()
        stream = torch.cuda.current_stream(self._side.device)
        stream.wait_event(end)
        if self._makes_result and isinstance(result, Tensor):
            result.record_stream(stream)  # made on the side, it must outlast its use here
        self._operation = None
        self._side.release(self)
        return result

    def is_done(self) -> bool:
        """Whether the GPU is through."""
        if not super().is_done():
            return False
        return self._error is not None or self._result is None or self._result.end.query()

    def is_done_soon(self) -> bool:
        """Whether the GPU is through, after a moment."""
        if self.is_done():
            return True
        launched = self._result
        return launched is not None and self._side.await_briefly(launched.end)

    def would_block(self) -> bool:
        """Until it is launched."""
        return not super().is_done()


class ForeseenWork(StreamWork):
    """An operation that was launched before headers were compared; [Note: foreseen operations]."""

    def __init__(
        self,
        launch: Callable[[], Launched],
        operation: Operation,
        side: SideStream,
        confirmation: Work[None],
    ) -> None:
        """``confirmation`` compares the headers."""
        super().__init__(launch, operation, side)
        self._confirmation = confirmation

    def confirm(self) -> None:
        """Waits until they are compared."""
        self._confirmation.wait()
