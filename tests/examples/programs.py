"""The programs in examples/: what there is, how each is run, what it changes.

In: a folder. Out: its programs as text, and what they print. A program that differs in
its import alone is not stored: `drop_in` makes it.
"""

import contextlib
import difflib
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).resolve().parents[2] / "examples"
_AMP = re.compile(r"^from torch\.amp import ", re.MULTILINE)
_LOSS = re.compile(r"^final loss (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """One way to write a program."""

    folder: str
    form: str
    """before, drop_in, prepared, rewritten, or run: as `halfstep run` runs it."""
    text: str

    @property
    def needs_torchrun(self) -> bool:
        """It says so in its first lines."""
        return "Run: torchrun" in self.text

    @property
    def needs_own_process(self) -> bool:
        """It cannot run in this one, or would leave something behind for others.

        apex's O1 changes torch for good; Accelerate has one state a process.
        """
        left_behind = "amp.initialize", "accelerate", "transformers", "CUDAGraph"
        return self.form == "run" or any(name in self.text for name in left_behind)

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return self.text.removeprefix('"""').splitlines()[0].removesuffix('"""')

    def with_dtype(self, dtype: str) -> "Program":
        """Return the program in another format on a CPU, and none too large for one."""
        text = self.text.replace("else torch.bfloat16", f"else torch.{dtype}")
        text = text.replace("else (1024, 10)", "else (128, 10)")
        return Program(self.folder, self.form, text)

    def run(self, *, apart: bool = False) -> str:
        """Return what it prints.

        Args:
            apart: In a process of its own, as its user runs it.
        """
        with self.file() as file:
            if apart:
                return self._run_apart(file)
            printed = StringIO()
            with redirect_stdout(printed):
                runpy.run_path(str(file), run_name="__main__")
            return printed.getvalue()

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "program.py"
            file.write_text(self.text, encoding="utf-8")
            yield file

    def _run_apart(self, file: Path) -> str:
        words: list[str] = []
        if self.needs_torchrun:
            words = ["-m", "torch.distributed.run", "--standalone"]
            words += ["--nproc-per-node", "2"]
        elif self.form == "run":
            words = ["-m", "halfstep", "run", "--level", "O1", "--dtype", "bf16"]
        command = [sys.executable, *words, str(file)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300
        )
        # torch with gloo, halfstep or not, after all is done: once in twenty runs.
        at_exit = "terminate called without an active exception" in done.stderr
        ended = at_exit and _LOSS.search(done.stdout)
        assert done.returncode == 0 or ended, done.stderr
        return done.stdout

    def changes(self, before: "Program") -> tuple[list[str], int, int]:
        """Return the diff to another form, and its lines removed and added."""
        # What it says of itself is no change.
        own, other = (_without_docstring(p.text) for p in (self, before))
        lines = list(difflib.unified_diff(other, own, n=1, lineterm=""))[2:]
        removed = sum(line.startswith("-") and line != "-" for line in lines)
        added = sum(line.startswith("+") and line != "+" for line in lines)
        return [line for line in lines if not line.startswith("@@")], removed, added

    def changed_lines(self, before: "Program") -> int:
        """Return how many lines differ: one that is replaced counts once.

        Blank lines and the first words of a program do not count.
        """
        own, other = (_without_docstring(p.text) for p in (self, before))
        matcher = difflib.SequenceMatcher(None, other, own, autojunk=False)
        return sum(
            max(len(list(filter(None, other[i:j]))), len(list(filter(None, own[k:n]))))
            for tag, i, j, k, n in matcher.get_opcodes()
            if tag != "equal"
        )

    @property
    def is_adapter(self) -> bool:
        """It trains in the loop of another library."""
        return "from halfstep.compat." in self.text and self.folder != "apex"


def _without_docstring(text: str) -> list[str]:
    return text.split('"""', 2)[2].strip().splitlines()


def final_loss(printed: str) -> float:
    """Return the last loss that a program printed."""
    return float(_LOSS.findall(printed)[-1])


def folders() -> list[str]:
    """Return the names of all examples."""
    return sorted(file.parent.name for file in FOLDER.glob("*/before.py"))


def before(folder: str) -> "Program":
    """Return the program as people have it."""
    text = (FOLDER / folder / "before.py").read_text(encoding="utf-8")
    return Program(folder, "before", text)


def afters(folder: str) -> Iterator[Program]:
    """Yield the forms of a program with halfstep."""
    program = before(folder)
    if _AMP.search(program.text):
        yield Program(
            folder, "drop_in", _AMP.sub("from halfstep import ", program.text)
        )
    if "Run: halfstep run" in program.text:
        yield Program(folder, "run", program.text)
    for file in sorted((FOLDER / folder).glob("*.py")):
        if file.stem != "before":
            yield Program(folder, file.stem, file.read_text(encoding="utf-8"))
