"""What holds for every test: nothing is left behind, examples repeat."""

import gc
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

import leaks
from shoal.launch.function.forkserver.forkserver import fork_server, preload

# The same examples every time, so that a change alone can break them; the full run looks further.
hypothesis.settings.register_profile("fast", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=200, deadline=None)
hypothesis.settings.load_profile("fast")

leaks.mark_descendants()
# What the modules of functions that tests run in processes import, so that no rank has to.
preload("pytest", "hypothesis", "leaks", "pools")
# A shell that starts the tests in the background makes them deaf to what some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cuda_is_up() -> None:
    """What CUDA opens when it is first used stays open."""
    if torch.cuda.is_available():
        torch.ones(1, device="cuda").sum().item()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaks a thread, a process, shared memory, a descriptor or a variable."""
    if request.node.get_closest_marker("gpu"):  # some of these start processes, which others fork
        fork_server()
    with leaks.watched(lambda message: pytest.fail(message, pytrace=False)):
        yield


def pytest_collection_finish() -> None:
    """What imports and thousands of collected tests made stays: no collection looks there again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
