"""Where launched ranks meet: the server stays for the last node; plain torch has a port too."""

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.watching import DEADLINE_SECONDS
from shoal.launch.script.launcher import LaunchConfig, launch

Write = Callable[[str], str]


def test_ranks_of_plain_torch_meet_at_a_store_of_rank_0(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(
        "from torch.distributed.rendezvous import rendezvous\n"
        "store, rank, size = next(rendezvous('env://'))\n"
        "store.set(f'from {rank}', 'x')\n"
        "store.wait([f'from {other}' for other in range(size)])\n"
        "store.set(f'seen by {rank}', 'x')\n"
        "store.wait([f'seen by {other}' for other in range(size)])\n"
        "print('met', size)\n"
    )
    assert launch(LaunchConfig(path, ranks=2)) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] met 2", "[rank 1] met 2"]


LATE = """
if os.environ['RANK'] == '0':
    open(sys.argv[1] + '~', 'w').write(str(os.getpid()))
    os.rename(sys.argv[1] + '~', sys.argv[1])
    sys.exit()
from shoal.meeting.client import MeetingClient
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
while os.path.exists('/proc/' + open(sys.argv[1]).read()): time.sleep(0.01)
MeetingClient(os.environ['SHOAL_MEETING']).close()
print('but here')
"""


@pytest.mark.slow
def test_the_server_outlives_the_ranks_of_its_own_node(
    script: Write, background: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = script(LATE)
    nodes = [
        background(
            *f"--nodes 2 --node-rank {node} --master 127.0.0.1:{port}".split(),
            path,
            str(tmp_path / "pid"),
        )
        for node in (0, 1)
    ]
    answers = [node.communicate(timeout=2 * DEADLINE_SECONDS) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], answers
    assert answers[1][0] == "[rank 1] but here\n"
