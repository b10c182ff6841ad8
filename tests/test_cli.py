"""The command line: what each command prints, writes and leaves with."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from data_files import complaint, leave
from small_training import small_and_measured, write_letters

import halfstep
from halfstep import LossScaleCollapse, cli
from halfstep.bench import commands
from halfstep.machine import hardware
from halfstep.machine.gemm import GemmRates
from halfstep.train import run as room
from halfstep.train.signals import Diverged

COMMANDS = ("train", "predict", "doctor", "bench", "compare", "env", "levels")
BENCHES = tuple(commands.BENCHES)
EVERY = [[], *([each] for each in COMMANDS), *(["bench", each] for each in BENCHES)]
TRAIN = ("train", "--data", "letters.json", "--model", "mini")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "ascii"}
RUN = ("--epochs", "1", "--level", "O0", "--out", "run")
INTERRUPTED = "interrupted; `train --resume` continues from the last checkpoint, if any"


@pytest.fixture(autouse=True, scope="module")
def _small_and_measured() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        small_and_measured(patch)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.delenv("RANK", raising=False)
        yield


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_letters(tmp_path, 40)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    write_letters(place, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert cli.run([*TRAIN, *RUN]) == 0
    return place


@pytest.fixture
def beside(finished: Path, here: Path) -> Path:
    return shutil.copytree(finished / "run", here / "run")


def test_examples_are_commands() -> None:
    """Law: each example in the help is a command, with flags that it takes."""
    examples = cli._EPILOG.splitlines()[1:]
    assert len(examples) > 5
    for example in examples:
        typed, _, _ = example.strip().partition("   ")  # what follows explains it
        _, program, words = typed.rpartition("halfstep ")
        assert program
        assert cli._parser().parse_args(shlex.split(words)).command


def test_levels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: the four levels are a table, as data too.

    A --json that cannot be written fails, after printing what it can.
    """
    assert leave("levels", "--json", "levels.json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    (table,) = json.loads((here / "levels.json").read_text(encoding="utf-8"))
    assert table["title"] == "Levels"
    for name in ("O0", "O1", "O2", "O3"):
        assert sum(line.startswith(f"{name} ") for line in out.splitlines()) == 1
    assert leave("levels", "--json", "nowhere/levels.json") == 2
    printed, err = capsys.readouterr()
    assert printed == out
    assert complaint(err) == (
        "--json nowhere/levels.json cannot be written: No such file or directory."
    )


def test_env(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: rates and advice are printed, and are in the data as numbers."""
    rates = hardware.gemm_rates("cpu")
    measured = GemmRates(rates, dict.fromkeys(rates, 0.0))
    monkeypatch.setattr(hardware, "measured_rates", lambda *_, **__: measured)
    assert leave("env", "--json", "env.json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert torch.__version__ in out
    facts, rates, advice = json.loads((here / "env.json").read_text(encoding="utf-8"))
    assert [each["title"] for each in (facts, rates, advice)] == [
        *("Machine", "Matmul rates, measured", "Advice")
    ]
    assert "2.0" in json.dumps(rates)
    assert "bf16 matmuls run 2.0 times as fast as fp32" in out


def test_train(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a run prints its level, load, quality and report, and no noise."""
    for load, more in ((0.0, ()), (9999.0, ("--overwrite",))):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert leave(*TRAIN, *RUN, *more) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert ("\nload average 9999.0 on " in out) == (load > 0)
    assert out.startswith("level O0 fp32: level O0 was asked for\n")
    assert "\nQuality on dev\n" in out
    assert out.endswith("\nreport: run/report.html\n")
    page = (here / "run" / "report.html").read_text(encoding="utf-8")
    for words in ("halfstep run: letters", "By label, on dev", "O0 fp32", "batch_size"):
        assert words in page


@pytest.mark.usefixtures("beside")
def test_overwrite_and_resume(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: --overwrite trains anew; resuming a finished run changes no weight."""
    weights = here / "run" / "model" / "model.safetensors"
    before = weights.read_bytes()
    assert leave("train", "--resume", "--out", "run") == 0
    assert weights.read_bytes() == before
    assert leave("train", "--resume", "--config", "run/resolved.toml") == 0
    assert "from step 2" in capsys.readouterr().out
    assert leave(*TRAIN, *RUN, "--seed", "1", "--overwrite") == 0
    assert weights.read_bytes() != before


@pytest.mark.filterwarnings("default")
def test_emulation_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a slow format is used as asked, and costs one line that says how slow."""
    rates = {"fp32": 1.0, "bf16": 0.25, "fp16": 0.5}
    monkeypatch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)
    monkeypatch.setattr(hardware, "native", lambda *_: "")
    assert leave(*TRAIN, *RUN[:2], "--level", "O2", "--dtype", "bf16") == 0
    assert capsys.readouterr().err == (
        "halfstep: warning: dtype=bf16: this cpu runs bf16 matmuls at 0.250 "
        "TFLOP/s, fp32 at 1.000: expect 4.0 times the "
        "time. Use level O0.\n"
    )


@pytest.mark.filterwarnings("error")
def test_warnings_stay_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a command neither hides warnings made errors, nor keeps their display."""
    shown = warnings.showwarning
    monkeypatch.setattr(room, "run", lambda *_, **__: warnings.warn("x", stacklevel=1))
    with pytest.raises(UserWarning, match="x"):
        leave(*TRAIN)
    assert warnings.showwarning is shown


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, INTERRUPTED),
        (LossScaleCollapse("50 steps\noverflowed."), 1, "50 steps overflowed."),
        (Diverged("training\nhas diverged."), 1, "training has diverged."),
        (OSError(28, "No space left on device", "run/x"), 2, "[Errno 28] No space lef"),
    ],
)
def test_a_run_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    line: str,
) -> None:
    """Law: a run that fails leaves one line and a status that tells why."""
    monkeypatch.setattr(room, "run", Mock(side_effect=error))
    assert leave(*TRAIN) == status
    assert complaint(capsys.readouterr().err).startswith(line)


def test_interrupted_before_it_began(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: Ctrl-C while words are read leaves one line too."""
    monkeypatch.setattr(cli, "_parser", Mock(side_effect=KeyboardInterrupt))
    assert leave("--version") == 130
    assert complaint(capsys.readouterr().err) == "interrupted"


def test_reading_words_is_light(here: Path) -> None:
    """Law: words are read, and workloads listed, with nothing but Python's own library.

    --version prints the version and nothing else.
    """
    program = (
        "import sys\nimport halfstep\n"
        "for name in ('torch', 'numpy', 'datasets', 'transformers', 'tomli_w'):\n"
        "    sys.modules[name] = None  # no import of it works\n"
        "from halfstep import cli\nfor words in sys.argv[1:]:\n"
        "    try:\n        cli.run(words.split())\n    except SystemExit: pass\n"
    )
    commands = ("--version", "train --help", "train --help-all", "bench --help")
    done = subprocess.run(
        [sys.executable, "-c", program, *commands],
        cwd=here,
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    out = done.stdout.decode()
    assert out.startswith(f"{halfstep.__version__}\nusage: ")
    assert out.count("usage: ") == len(commands) - 1


def test_defects_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: an error that is ours comes through as it is."""
    monkeypatch.setattr(room, "run", Mock(side_effect=RuntimeError("ours")))
    with pytest.raises(RuntimeError, match="ours"):
        leave(*TRAIN)


@pytest.mark.usefixtures("beside")
def test_predict(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: texts give a table; a file's rows stay, in a file or a line each on a pipe.

    Flags may stand before the texts.
    """
    assert leave("predict", "run", "--device", "cpu", "abc", "def") == 0
    out, err = capsys.readouterr()
    assert err == ""
    title, head, _, *rows = out.splitlines()
    assert title == "Predictions"
    assert head.split() == ["label", "p(0)", "p(1)", "text"]
    assert [row.split()[-1] for row in rows] == ["abc", "def"]
    (here / "posts.csv").write_text("id,body\n07,abc\n08, \n09,def\n", encoding="utf-8")
    words = ("predict", "run", "--data", "posts.csv", "--text-column", "body")
    assert leave(*words) == 2
    assert "posts.csv line 3" in complaint(capsys.readouterr().err)
    assert leave(*words, "--skip-bad-rows", "--out", "out.csv") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "\n2 rows, " in f"\n{err}"
    assert "posts.csv: 1 row left out" in err
    lines = (here / "out.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "id,body,label,p(0),p(1)"
    labels = [row.split()[0] for row in rows]
    assert [line.split(",")[:3] for line in lines[1:]] == [
        *(["07", "abc", labels[0]], ["09", "def", labels[1]])
    ]
    assert leave(*words, "--skip-bad-rows") == 0
    out, _ = capsys.readouterr()
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["07", "09"]
    assert leave("predict", "run", "posts.csv") == 2
    assert "--data posts.csv" in complaint(capsys.readouterr().err)


BARE = """
import sys
for name in ("jinja2", "matplotlib", "sklearn", "tomli_w"):
    sys.modules[name] = None
from halfstep import cli
cli.main()
"""


def start(here: Path, *words: str, bare: bool = False) -> tuple[int, str, str]:
    """Run the program on a console without Chinese; bare without what trains."""
    program = ("-c", BARE) if bare else ("-m", "halfstep")
    done = subprocess.run(
        [sys.executable, *program, *words],
        cwd=here,
        env=os.environ | ENVIRONMENT,
        input="天é😀\n".encode(),
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_the_program(here: Path) -> None:
    """Law: the program itself leaves with the status, and one line on stderr."""
    status, out, err = start(here, *TRAIN[:3], "--device", "tpu")
    assert (status, out) == (2, "")
    assert complaint(err) == "--device 'tpu' must be one of auto, cpu, cuda."


@pytest.mark.skipif(os.name != "posix", reason="needs a shell that closes streams")
def test_closed_streams(here: Path) -> None:
    """Law: with standard output and error closed, files and status are as ever."""
    words = (sys.executable, "-m", "halfstep", "levels", "--json")
    for file, status in (("file.json", 0), ("no/file.json", 2)):
        shell = ("sh", "-c", 'exec "$@" >&- 2>&-', "sh", *words, file)
        done = subprocess.run(
            shell, cwd=here, env=os.environ | ENVIRONMENT, check=False
        )
        assert done.returncode == status
    assert json.loads((here / "file.json").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("beside")
def test_what_each_command_needs(here: Path) -> None:
    """Law: predict works without what only training needs; train names packages.

    A console that lacks a character shows its code as JSON does, instead of failing.
    """
    status, out, err = start(here, "predict", "run", "-", "--json", "-", bare=True)
    assert status == 0
    assert "\n1 row, " in f"\n{err}"
    assert "\\u5929\\u00e9\\ud83d" in out
    assert json.loads(out)["text"] == "天é😀"
    status, _, err = start(here, "train", "--out", "new", bare=True)
    assert status == 2
    assert complaint(err) == (
        "halfstep train needs jinja2, matplotlib, scikit-learn, tomli-w: "
        "install with pip install 'halfstep[train,report]', or in a checkout pip "
        "install -e '.[train,report]'."
    )


@pytest.mark.usefixtures("beside")
def test_json_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: with --json - standard output holds the data and nothing else."""
    for words in (("levels",), ("env",), ("doctor", "run")):
        assert leave(*words, "--json", "-") == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert leave(*words, "--json", "file.json") == 0
        capsys.readouterr()
        assert json.loads(out) == json.loads(Path("file.json").read_text("utf-8"))
        assert not Path("-").exists()
    assert leave("predict", "run", "abc", "def", "--json", "-") == 0
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["text"] for each in found] == ["abc", "def"]
    assert "\n2 rows, " in f"\n{err}"


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_on_60_columns(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Law: each command explains itself; a narrow terminal loses no word of it."""
    told = []
    for columns in (60, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert leave(*words, "--help") == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert out.startswith(f"usage: {' '.join(['halfstep', *words])}")
        assert max(map(len, out.splitlines())) <= columns
        told.append(sorted(out.split()))
        for command in COMMANDS if not words else ():
            assert f"\n    {command} " in out
    assert told[0] == told[1]
    assert len(told[0]) > 30


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    "words",
    [
        ("levels",),
        ("env",),
        ("doctor", "run"),
        ("predict", "run", "abc " * 40, "def"),
        (*TRAIN, *RUN[:4], "--out", "new"),
    ],
    ids=lambda words: words[0],
)
def test_output_on_60_columns(
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Law: what a command prints fits the columns of a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "60")
    assert leave(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert max(map(len, lines)) > 40
