"""`halfstep predict` of a file beside plain loops over its rows.

Run it from the root of the repository, where the tests' requirements are installed:

    python -m benchmarks.predict [--rows N] [--loop-rows N] [--size NAME] [--write FILE]

The loops read the CSV file, tokenize, run the model in fp32 and write a label and
probabilities for each row: a text at a time, 32 texts at a time in the order of the
file, and transformers' pipeline with batches of 32. They run on the first rows alone.
Weights are random: time does not depend on them.
"""

from __future__ import annotations

import csv
import random
import resource
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from benchmarks import page

from halfstep.reporting.table import Table
from halfstep.train import model, prediction_files
from halfstep.train.config import TrainConfig, write_resolved
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.predict import Predictor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SIZES = {
    **model.SIZES,
    "mini": {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
}
CHARACTERS = [chr(0x4E00 + number) for number in range(2000)]
CLASSES = ("angry", "disgust", "happy", "like", "other", "sad")
LONGEST = 128
MEAN_LOG_LENGTH, LOG_SPREAD = 2.7, 0.7
"""Of the lengths of texts: 15 characters in the middle, 19 on average, as in posts."""


def write_rows(path: Path, count: int) -> None:
    """Write a CSV file of random texts with two columns more."""
    draw = random.Random(0)  # noqa: S311 -- texts are no secret
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "source"])
        for number in range(count):
            length = min(
                LONGEST, 1 + int(draw.lognormvariate(MEAN_LOG_LENGTH, LOG_SPREAD))
            )
            text = "".join(draw.choices(CHARACTERS, k=length))
            writer.writerow([f"{number:07d}", text, "web"])


def make_run(path: Path, size: str, level: str, dtype: str) -> None:
    """Write the folder of a finished run with random weights."""
    torch.manual_seed(0)
    tokenizer = model.character_tokenizer(["".join(CHARACTERS)] * 2, LONGEST)
    config = transformers.BertConfig(
        **SIZES[size],
        vocab_size=len(tokenizer),
        max_position_embeddings=LONGEST,
        id2label=dict(enumerate(CLASSES)),
    )
    folder = RunFolder(path)
    settings = TrainConfig(level=level, dtype=dtype).data_dict()
    folder.begin(settings, overwrite=True)
    write_resolved(path / "resolved.toml", settings)
    network = transformers.BertForSequenceClassification(config)
    folder.save_model(network, tokenizer)


def read(path: Path, count: int) -> Iterable[dict[str, str]]:
    """Yield the first rows of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        yield from islice(csv.DictReader(file), count)


def loop(run: Path, data: Path, out: Path, count: int, batch: int) -> None:
    """Label rows in batches, in the order of the file."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    network = transformers.AutoModelForSequenceClassification.from_pretrained(
        run / "model"
    )
    network.eval()
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        rows = iter(read(data, count))
        while part := list(islice(rows, batch)):
            texts = [row["text"] for row in part]
            inputs = tokenizer(
                texts, truncation=True, padding=True, return_tensors="pt"
            )
            with torch.no_grad():
                shares = network(**inputs).logits.softmax(-1)
            for row, one in zip(part, shares, strict=True):
                label = network.config.id2label[int(one.argmax())]
                writer.writerow([*row.values(), label, *one.tolist()])


def pipeline(run: Path, data: Path, out: Path, count: int) -> None:
    """Label rows with transformers' pipeline."""
    classify: Any = transformers.pipeline(
        "text-classification", model=str(run / "model"), device="cpu", top_k=None
    )
    rows = list(read(data, count))
    texts = (row["text"] for row in rows)
    found = classify(texts, batch_size=32, truncation=True)
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        for row, one in zip(rows, found, strict=True):
            writer.writerow([*row.values(), *(each["score"] for each in one)])


def predict(run: Path, data: Path, out: Path, count: int) -> None:
    """Label rows as `halfstep predict` does."""
    predictor = Predictor(run, "cpu")
    given = {"text_column": None, "encoding": None, "delimiter": None}
    rows = predictor.read_rows(str(data), [], **given, skip_bad_rows=False)
    prediction_files.write(predictor, islice(rows, count), out, ".csv")


def timed(name: str, count: int, call: Callable[[], object]) -> tuple[Any, ...]:
    """Return a row: rows a second of wall time and of CPU time, peak memory."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    sys.stderr.write(f"{name}: {count} rows, {wall:.1f} s, {cpu:.1f} s of CPU\n")
    return name, count, count / wall, count / cpu, peak


def main() -> None:
    """Write the file and the runs, time all, print the page."""
    flags = page.parser(__doc__ or "")
    flags.add_argument("--rows", type=int, default=100_000)
    flags.add_argument("--loop-rows", type=int, default=5_000)
    flags.add_argument("--size", default="tiny", choices=SIZES)
    words = flags.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        data, out = place / "posts.csv", place / "out.csv"
        write_rows(data, words.rows)
        runs = {dtype: place / dtype for dtype in ("fp32", "bf16")}
        for (dtype, run), level in zip(runs.items(), ("O0", "O2"), strict=True):
            make_run(run, words.size, level, dtype)
        few, one = words.loop_rows, max(1, words.loop_rows // 4)
        fp32, bf16 = runs.values()
        rows = [
            timed("a text at a time", one, lambda: loop(fp32, data, out, one, 1)),
            timed("batches of 32", few, lambda: loop(fp32, data, out, few, 32)),
            timed("pipeline", few, lambda: pipeline(fp32, data, out, few)),
            timed("predict, O0", few * 4, lambda: predict(fp32, data, out, few * 4)),
            timed(
                "predict, O2 bf16",
                words.rows,
                lambda: predict(bf16, data, out, words.rows),
            ),
        ]
    columns = ("program", "rows", "rows/s", "rows per CPU second", "peak MiB so far")
    table = Table("", columns, tuple(rows), digits=0)
    command = f"python -m benchmarks.predict --size {words.size} --rows {words.rows}"
    head = page.head("predictions for a file", command)
    page.write(f"{head}\n\n```text\n{table}\n```\n", words.write)


if __name__ == "__main__":
    main()
