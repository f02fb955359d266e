"""Every exception a user of shoal may want to catch."""

from __future__ import annotations


class ShoalError(Exception):
    """The root of all errors that shoal raises about the distributed run itself."""


class PeerError(ShoalError):
    """Another rank failed, so this one cannot go on.

    Example:
        >>> error = PeerError(2, "ValueError: boom (train.py:17)")
        >>> error.rank, error.reason
        (2, 'ValueError: boom (train.py:17)')
    """

    def __init__(self, rank: int, reason: str, context: str = "") -> None:
        """Names the rank that failed first, why, and what this rank was doing."""
        super().__init__(rank, reason, context)
        self.rank = rank
        self.reason = reason
        self.context = context

    def __str__(self) -> str:
        """One sentence: who, why, and what was interrupted here."""
        text = f"rank {self.rank} failed: {self.reason}"
        return f"{text}\n  while this rank was in {self.context}" if self.context else text


class MembershipChanged(PeerError):
    """A rank of an elastic run is gone: the attempt at hand is void, and will be made again.

    Raised inside of `with optimizer.attempt():`, which ends it on all ranks that are left.
    """

    def __str__(self) -> str:
        """As ever, and what to do: it is shown only where no attempt has ended it."""
        return (
            f"{super().__str__()}\n  The others go on from inside of `with optimizer.attempt():` "
            "only, and this was outside: put what ranks do together into an attempt of its own"
        )


class MismatchError(ShoalError):
    """Ranks of one group called different things; nothing was moved."""


class DeadlineError(ShoalError):
    """A rank that is alive did not arrive before the deadline."""


class DeadlockError(DeadlineError):
    """Ranks wait for each other, and none of them can go on; the message names their calls."""

    reason = ""
    """What other ranks are told, so that those which are stuck too raise the same."""


class NotHeldError(ShoalError, LookupError):
    """A tensor was asked for that no rank holds, or not the one that was asked."""


class ClosedError(ShoalError):
    """A world was used after it was shut down, or before it was started."""


class TransportError(ShoalError):
    """The library that carries the bytes failed, and no rank is known to be at fault."""


class BackendUnavailableError(ShoalError):
    """A backend cannot run here; the message says what to install or use instead."""


class LaunchError(ShoalError):
    """Ranks could not be started, or their environment makes no sense."""


class UntrustedPickleError(ShoalError):
    """An object needs pickle, and this world may have peers that are not ours."""


class RemoteError(ShoalError):
    """Stands in for another rank's exception that cannot be rebuilt here."""

    def __init__(self, type_name: str, message: str) -> None:
        """Keeps the name and the text of the exception it stands for."""
        super().__init__(type_name, message)
        self.type_name = type_name
        self.message = message

    def __str__(self) -> str:
        """Reads like the exception it stands for."""
        return f"{self.type_name}: {self.message}"


class CheckpointError(ShoalError):
    """A checkpoint could not be written or read; what there was before is untouched."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is damaged, missing or not what it claims to be.

    Example:
        >>> error = CorruptCheckpointError("run/000001/data-00000.safetensors", "checksum", "w")
        >>> error.file, error.tensor
        ('run/000001/data-00000.safetensors', 'w')
    """

    def __init__(self, file: str, reason: str, tensor: str | None = None) -> None:
        """Names the file, what is wrong with it, and the tensor that is concerned."""
        super().__init__(file, reason, tensor)
        self.file, self.reason, self.tensor = file, reason, tensor

    def __str__(self) -> str:
        """One sentence."""
        about = f" (tensor {self.tensor!r})" if self.tensor is not None else ""
        return f"{self.file}{about}: {self.reason}"


class CheckpointMismatchError(CheckpointError):
    """A checkpoint and the model or optimizer it is loaded into do not fit."""


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over or left behind; the message says which, and why."""
