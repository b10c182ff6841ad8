"""What halfstep changes in torch: while a context is open, and not after."""

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep._torch.patches import AttributePatch, SharedPatches

PROGRAM = """
import gc, sys, types
import torch
from torch import nn
from torch.nn.parallel import parallel_apply
import torch._dynamo, torch.optim, torch.utils.checkpoint

def contents():
    "Every attribute of every module and class of torch, by identity."
    seen = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or type(module) is not types.ModuleType:
            continue
        for key, value in list(vars(module).items()):
            seen[name, key] = id(value)
            if key == "RemovableHandle":
                continue  # it counts
            if isinstance(value, type) and value.__module__.startswith("torch"):
                for inner, attribute in list(vars(value).items()):
                    seen[value.__module__, value.__qualname__, inner] = id(attribute)
    for key in ("CPU", "CUDA", "MPS", "XPU"):
        for op in ("linear", "mm", "softmax.int", "layer_norm", "gelu", "cat"):
            table = torch._C._dispatch_dump_table(f"aten::{op}").splitlines()
            seen[op, key] = [row for row in table if row.startswith(f"Autocast{key}")]
    tables = sys.modules["torch.optim.optimizer"]
    seen["hooks"] = len(tables._global_optimizer_pre_hooks)
    seen["more hooks"] = len(tables._global_optimizer_post_hooks)
    return seen

def step(context, again=False):
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with context, torch.no_grad():
        layer(torch.ones(2, 4))
    with context:
        run = torch.utils.checkpoint.checkpoint
        x = torch.ones(2, 4, requires_grad=True)
        loss = run(layer, x, use_reentrant=False).sum() if again else layer(x).sum()
    loss.backward()
    optimizer.step()

step(torch.autocast("cpu"), again=True)
nn.DataParallel(nn.Linear(2, 2))
before = contents()
import halfstep as hs
# Its modules import some of torch's that were not there before.
different = {k for k, v in contents().items() if k in before and before[k] != v}
assert not different, different
step(hs.autocast("cpu"))
before |= {k: v for k, v in contents().items() if k not in before}
leaf = hs.autocast("cpu", policy="torch + op:linear=fp32")
with leaf:
    inside = {k for k, v in contents().items() if before.get(k) != v}
    assert ("torch._ops", "key_extractor") in inside, inside
for again in (False, True):
    step(hs.autocast("cpu"), again)
    step(leaf, again)
    step(hs.autocast("cpu", cache=hs.CastCache()), again)
    step(hs.autocast("cpu", policy="lean", record=True), again)

def train():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    for level in ("O1", "O2"):
        net = __import__("copy").deepcopy(model)
        optimizer = torch.optim.AdamW(net.parameters())
        session = hs.prepare(net, optimizer, level, dtype="fp16", policy="lean")
        for _ in range(2):
            with session.autocast():
                loss = session.model(torch.ones(2, 4)).float().sum()
            session.backward(loss)
            session.step()

train()
del leaf  # it holds the cache of its last entry
gc.collect()
after = contents()
different = {k for k, v in before.items() if after.get(k) != v}
assert not different, different
"""


@pytest.mark.filterwarnings("default")
def test_torch_is_as_it_was() -> None:
    """Law: after contexts and sessions are gone, torch is what it was before.

    Object by object, every attribute of its modules and classes, and its kernels.
    """
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Owner:
    @staticmethod
    def method() -> list[str]:
        return []


def wrapping(name: str) -> SharedPatches:
    def wrap(original: Any) -> Any:
        return staticmethod(lambda: [*original.__func__(), name])

    return SharedPatches(AttributePatch(Owner, "method", wrap))


def test_patches_hold_while_used() -> None:
    """Law: the first user brings them, the last takes them back, once each."""
    patches, original = wrapping("a"), vars(Owner)["method"]
    for _ in range(2):
        patches.acquire(1)
        patches.acquire(2)
        assert Owner.method() == ["a"]
        patches.release(1)
        assert Owner.method() == ["a"]
        patches.release(2)
        assert vars(Owner)["method"] is original


def test_a_patch_of_others_stays() -> None:
    """Law: what somebody else has put over a patch is not taken away with it."""
    patches, others, original = wrapping("a"), wrapping("b"), vars(Owner)["method"]
    patches.acquire(1)
    others.acquire(1)
    patches.release(1)
    assert Owner.method() == ["a", "b"]
    others.release(1)
    assert Owner.method() == ["a"]
    Owner.method = original  # type: ignore[method-assign]


def test_a_release_in_the_middle() -> None:
    """Law: a user that goes while patches are being made is not missed."""
    patches: SharedPatches

    def goes(original: Any) -> Any:
        patches.release(1)
        return staticmethod(lambda: [*original.__func__(), "b"])

    original = vars(Owner)["method"]
    patches = SharedPatches(wrapping("a"), AttributePatch(Owner, "method", goes))
    patches.acquire(1)
    assert vars(Owner)["method"] is original


def test_threads_share_patches() -> None:
    """Law: from many threads at once, all is undone after the last."""
    patches, original = wrapping("a"), vars(Owner)["method"]
    wrong: list[object] = []

    def work() -> None:
        for _ in range(300):
            patches.acquire(threading.get_ident())
            if Owner.method() != ["a"]:
                wrong.append(Owner.method())
            patches.release(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert vars(Owner)["method"] is original


# Names of torch that a program binds anew


def test_torch_autocast_may_be_rebound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: with torch's names for it bound to ours, contexts work as before."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    for owner in (torch, torch.amp, torch.amp.autocast_mode):
        monkeypatch.setattr(owner, "autocast", hs.autocast)
    for policy, dtype in ((None, torch.bfloat16), ("torch + op:linear=fp32", None)):
        with torch.autocast("cpu", policy=policy):  # type: ignore[call-arg]
            out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            assert out.dtype == (dtype or torch.float32)
            with torch.amp.autocast("cpu", enabled=False):
                assert layer(x).dtype == torch.float32
        out.float().sum().backward()
    assert not torch.is_autocast_enabled("cpu")
