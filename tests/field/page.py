"""Writes docs/reports.md, "Problems people report", from the reports.

    python -m tests.field.page

Run it from the root of the repository; `test_page` fails where it was forgotten. The
python block on the page is run by the tests of the docs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.field.healthy import HEALTHY
from tests.field.healthy import load as load_healthy
from tests.field.report import REPORTS, load
from tests.field.test_field import UNEXPLAINED

if TYPE_CHECKING:
    from tests.field.report import Report

PAGE = Path(__file__).parents[2] / "docs" / "reports.md"

COMMANDS = {
    "diagnose": "`hs.diagnose(step)`",
    "check": "`hs.check(model, loss_fn, batch)`",
    "find_nonfinite": "`hs.find_nonfinite(model, step)`",
    "run": "error or warning",
    "impossible": "does not occur",
}
COLUMNS = ("you see", "cause", "found by", "fix", "reported in")


def link(source: str) -> str:
    """Return a link to a public thread."""
    repository, _, number = source.partition("#")
    name = repository.partition("/")[2]
    return f"[{name}#{number}](https://github.com/{repository}/issues/{number})"


def row(report: Report) -> str:
    """Return a row of a table."""
    command = COMMANDS[report.command]
    if report.name in UNEXPLAINED:
        command += " (not found yet)"
    sources = " ".join(map(link, report.sources))
    cells = (report.symptom, report.cause, command, report.cure, sources)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def page() -> str:
    """Return the page, a table for each area."""
    load()
    load_healthy()
    head = f"""# Problems people report

Search this page for what you see: {len(REPORTS)} kinds of problems with mixed
precision from public issue trackers, each with its cause, the call that finds the
cause, and the fix. Symptoms in one row have one cause; the tests run the first of
them. The call to begin with takes one step of your loop, as it is:

```python
import torch

import halfstep as hs

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def step():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 8)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.step()  # planted: scaler.step has already called it


for finding in hs.diagnose(step).findings:
    if finding.severity == "error":
        print(f"{{finding.rule}}: {{finding}}")
```

```output
call order: the step: optimizer.step() was called besides scaler.step(optimizer): no
step is skipped. Remove optimizer.step().
```

What it checks: [diagnose](diagnose.md). Common symptoms with examples:
[troubleshooting](troubleshooting.md).

| found by | meaning |
|---|---|
| a call, such as `hs.diagnose(step)` | its output names the cause |
| error or warning | the classes of halfstep print the cause without a call |
| does not occur | with the classes of halfstep the problem does not exist |
| not found yet | no call names it: {len(UNEXPLAINED)} of {len(REPORTS)} |

The classes are `hs.autocast` and `hs.GradScaler`, in place of torch's.

Each problem is a small program in `tests/field`. The tests check that the problem
occurs with torch's classes, that the call names the cause, and that the fix works; and
that the calls find nothing wrong in {len(HEALTHY)} programs without a problem.

This page is generated: `python -m tests.field.page`.
"""
    parts = [head]
    for area in dict.fromkeys(each.area for each in REPORTS.values()):
        parts += [f"\n## {area[0].upper()}{area[1:]}\n\n"]
        parts += [f"| {' | '.join(COLUMNS)} |\n", "|---" * len(COLUMNS) + "|\n"]
        parts += [f"{row(one)}\n" for one in REPORTS.values() if one.area == area]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
