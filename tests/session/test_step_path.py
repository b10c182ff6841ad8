"""How long the path of one plain step is: files, calls, calls between files.

For the autocast context, backward and step of O2 in fp16 with AdamW. The ceilings below
are what is reached: they only go down.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep
from halfstep.masters import cpu_kernels

FILES, CALLS, CROSSINGS = 16, 127, 45

PROGRAM = """
import json, sys
import torch
import halfstep as hs

home = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = hs.prepare(model, optimizer, "O2", dtype="fp16")
x = torch.randn(4, 8)

def once():
    with session.autocast():
        loss = session.model(x).float().pow(2).mean()
    session.backward(loss)
    session.step()

calls = []

def watch(frame, event, _):
    if event != "call" or not frame.f_code.co_filename.startswith(home):
        return
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(home):
        caller = caller.f_back
    source = None if caller is None else caller.f_code.co_filename[len(home) + 1:]
    calls.append((source, frame.f_code.co_filename[len(home) + 1:]))

once()
once()
sys.setprofile(watch)
once()
sys.setprofile(None)
print(json.dumps(calls))
"""


@pytest.mark.skipif(not cpu_kernels.available(), reason="no C compiler here")
def test_a_plain_step_is_short() -> None:
    """Law: the third step of a small network passes through no more than this."""
    home = str(Path(halfstep.__file__).parent)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, home]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    calls = json.loads(done.stdout)
    files = {target for _, target in calls}
    crossings = [1 for source, target in calls if source not in {None, target}]
    assert "session/session.py" in files
    assert len(files) <= FILES, sorted(files)
    assert len(calls) <= CALLS
    assert len(crossings) <= CROSSINGS
