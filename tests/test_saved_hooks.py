"""Which hooks on saved tensors are in force: what torch tells, or what is counted."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from halfstep import saved_hooks

COUNTED = """
import torch
del torch._C._autograd._top_saved_tensors_default_hooks
import pytest
sys.exit(pytest.main([{path!r}, "-q", "-p", "no:cacheprovider", "-k", "not counted"]))
"""


def same(x: torch.Tensor) -> torch.Tensor:
    """Be a hook that changes nothing."""
    return x


def test_number_of_the_innermost_hooks() -> None:
    """Law: each nest of hooks has its number, and leaving it gives back that around."""
    assert saved_hooks.hooks() == 0
    with saved_tensors_hooks(same, same):
        outer = saved_hooks.hooks()
        assert outer == id(same)
        with save_on_cpu():
            assert saved_hooks.hooks() not in {0, outer}
        assert saved_hooks.hooks() == outer
    assert saved_hooks.hooks() == 0


def test_an_error_leaves_no_hooks() -> None:
    """Law: hooks that an error ended are in force no longer."""
    with pytest.raises(ZeroDivisionError), saved_tensors_hooks(same, same):
        _ = 1 / 0
    assert saved_hooks.hooks() == 0


def test_hooks_are_those_of_a_thread() -> None:
    """Law: a thread does not see the hooks of another one."""
    seen = []
    with saved_tensors_hooks(same, same):
        thread = threading.Thread(target=lambda: seen.append(saved_hooks.hooks()))
        thread.start()
        thread.join()
    assert seen == [0]


def test_checkpointing_sets_hooks_forward_and_backward() -> None:
    """Law: each checkpoint has hooks of its own, recomputation others again."""
    seen = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(saved_hooks.hooks())
        return x.exp().exp()

    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(same, same):
        checkpoint(note, x, use_reentrant=False).sum().backward()
    forward, again = seen
    assert len({0, id(same), forward, again}) == 4


def test_counted_where_torch_does_not_tell() -> None:
    """Law: the same holds in a torch that does not say which hooks are in force."""
    if saved_hooks._top is None:
        pytest.skip("this torch does not tell: the other tests have counted")
    code = "import sys" + COUNTED.format(path=__file__)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
