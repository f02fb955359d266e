"""`shoal launch`: what must be there is checked and made, and taken away again at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.elastic.elastic_launch import ElasticLaunch
from shoal.launch.elastic.joined_run import JoinedRun
from shoal.launch.elastic.joining_launch import JoiningLaunch
from shoal.launch.script.config import LaunchConfig
from shoal.launch.script.guard import Guard, adopting_orphans
from shoal.launch.script.meeting_place import MeetingPlace
from shoal.launch.script.node_launch import NodeLaunch
from shoal.launch.script.streams import open_closed_streams
from shoal.system.limits import advice

__all__ = ["LaunchConfig", "launch"]


def launch(config: LaunchConfig) -> int:
    """Starts the ranks of this node and waits for them.

    Returns:
        0 if all ranks ended with 0, the code of the first that failed otherwise: 128 + n where
        signal n ended it, or the launcher itself.

    Raises:
        LaunchError: If the ranks cannot be started; none is left running then.

    Example:
        >>> launch(LaunchConfig("train.py", ("--lr", "0.1"), ranks=4))
        0
    """
    _refuse_missing_directory()
    config.refuse_missing_script()
    if config.log_dir is not None:
        _make_folder(config.log_dir)
    with contextlib.ExitStack() as stack:
        open_closed_streams()
        stack.enter_context(_refusing_at_limits())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        folder.chmod(0o700)  # whatever the umask
        kind, meeting = _kind_of(config)
        place = stack.enter_context(meeting(config))
        guard = stack.enter_context(Guard(folder))
        stack.enter_context(adopting_orphans())
        return asyncio.run(kind(config, folder, guard, place).run())


def _kind_of(config: LaunchConfig) -> tuple[type[NodeLaunch], type[MeetingPlace]]:
    if config.join is not None:
        return JoiningLaunch, JoinedRun
    return NodeLaunch if config.elastic is None else ElasticLaunch, MeetingPlace


@contextlib.contextmanager
def _refusing_at_limits() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = advice(error)
        if text is None:
            raise
        raise LaunchError(f"The ranks must be started, but {error.strerror}. {text}") from error


def _refuse_missing_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"The ranks must be started in the current directory, but the system says: "
            f"{error.strerror}. It may have been deleted: cd to one that exists."
        ) from None


def _make_folder(path: Path) -> None:
    try:
        for folder in reversed([path, *path.parents]):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                folder.chmod(folder.stat().st_mode | 0o700)  # whatever the umask
    except OSError as error:
        raise LaunchError(
            f"--log-dir must be a folder to write to, but {str(path)!r} cannot be made: "
            f"{error.strerror}. Choose another."
        ) from error
