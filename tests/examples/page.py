"""Writes docs/examples.md: each program in examples/, and what changes in it.

    python -m tests.examples.page

Run it from the root of the repository; `test_examples` fails where it was forgotten.
"""

from pathlib import Path

from tests.examples import programs

PAGE = Path(__file__).parents[2] / "docs" / "examples.md"
HEAD = """# Examples

Complete programs for a CPU or a GPU, each with the PyTorch, torch.amp or apex program
that it replaces. The files are in the folder `examples/`. The tests run all of them and
compare their final losses. For a first tour, open the
[notebook](../examples/first_steps.ipynb).

In most programs one import line changes:

```diff
-from torch.amp import GradScaler, autocast
+from halfstep import GradScaler, autocast
```

| example | drop-in | session, or other |
|---|---|---|
"""
FOOT = """
The columns show lines removed and added, without each program's docstring. Times of the
programs: [benchmark](../benchmarks/2026-11-25-examples.md).
"""
FORMS = {
    "prepared": "hs.prepare",
    "rewritten": "hs.rewrite",
    "drop_in": "drop-in",
    "run": "halfstep run",
    "adapter": "adapter",
}


def page() -> str:
    """Return the page."""
    rows, sections = [], []
    for folder in programs.folders():
        before = programs.before(folder)
        changed = {"drop_in": "", "other": ""}
        files, diffs = [f"[before](../examples/{folder}/before.py)"], list[str]()
        for after in programs.afters(folder):
            diff, removed, added = after.changes(before)
            count = f"-{removed} +{added}"
            if after.form == "drop_in":
                changed["drop_in"] = count
            else:
                form = "adapter" if after.is_adapter else after.form
                changed["other"] = f"{FORMS[form]}: {count}"
            if after.form == "run":
                diffs.append("```console\n$ halfstep run before.py\n```\n")
            if (programs.FOLDER / folder / f"{after.form}.py").exists():
                files.append(f"[{after.form}](../examples/{folder}/{after.form}.py)")
                diffs.append("\n".join(("```diff", *diff, "```\n")))
        title, anchor = folder.replace("_", " "), folder.replace("_", "-")
        rows.append(f"| [{title}](#{anchor}) | {' | '.join(changed.values())} |")
        sections.append(f"## {title}\n\n{before.summary} {' · '.join(files)}\n")
        sections += diffs
    return HEAD + "\n".join((*rows, FOOT, *sections))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
