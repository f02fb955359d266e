"""Where in the user's code a call came from."""

from __future__ import annotations

from typing import Any

import torch

from shoal.system.site import call_site


def test_a_call_site_is_the_users() -> None:
    assert call_site().startswith(f"{__file__}:")


def test_what_torch_calls_for_the_user_is_the_users_call() -> None:
    """A hook in backward: the line of ``loss.backward()`` helps, one of torch does not."""
    of_torch: dict[str, Any] = {"call_site": call_site}
    exec(compile("def hook(): return call_site()", torch.__file__, "exec"), of_torch)
    assert of_torch["hook"]().startswith(f"{__file__}:")
