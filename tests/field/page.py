"""Writes docs/reports.md, "Troubles people report", from the reports.

    python -m tests.field.page

Run it from the root of the repository; `test_page` fails where it was forgotten.
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
COLUMNS = ("symptom", "cause", "command", "cure", "reported in")


def link(source: str) -> str:
    """Return a link to a public thread."""
    repository, _, number = source.partition("#")
    name = repository.partition("/")[2]
    return f"[{name}#{number}](https://github.com/{repository}/issues/{number})"


def row(report: Report) -> str:
    """Return a row of a table."""
    command = COMMANDS[report.command]
    if report.name in UNEXPLAINED:
        command += " (does not answer this yet)"
    sources = " ".join(map(link, report.sources))
    cells = (report.symptom, report.cause, command, report.cure, sources)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def page() -> str:
    """Return the page, a table for each area."""
    load()
    load_healthy()
    answered = len(REPORTS) - len(UNEXPLAINED)
    head = f"""# Troubles people report

What public trackers are full of: {len(REPORTS)} kinds of trouble with mixed precision,
of which {answered} are answered. Each is a small program in
`tests/field`: there the trouble is seen to be real with torch's
classes, the command to name the cause, and the cure to work. {len(HEALTHY)} programs
that are well are accused of nothing.

```python
import halfstep as hs

print(hs.diagnose(step))  # `step` makes one step of your loop, as it is
```

That is the command to begin with, and [troubleshooting](troubleshooting.md) has more on
it. "Error or warning": with `hs.autocast` and `hs.GradScaler` in place of torch's
classes the program says it by itself. "Does not occur": with them all is well.

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
