"""Reads files, folders and hub data sets as normalised rows of text and label.

In: what --data names, and a `DataFormat`. Out: `Examples` by split, whose rows are a
memory-mapped `datasets.Dataset`; or a `UserError` that names file, line and remedy.

Tables and JSON are parsed here, as the readers of `datasets` drop or convert values
(NA, 007, True) and know no line numbers; parquet, saved and hub sets are theirs. The
rows are written once to `arrow_cache`, found again by the SHA-256 of the file and the
format:

    HASH.arrow   the rows
    HASH.json    their number and hash, notes, skipped rows
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from halfstep.distributed import process_group
from halfstep.errors import UserError
from halfstep.reporting.table import format_count
from halfstep.train.data import arrow_cache, tables, text_files
from halfstep.train.data.data_format import DataFormat
from halfstep.train.data.entity_files import RowError
from halfstep.train.data.row_values import row_reader
from halfstep.train.task_progress import track

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import datasets
    import pyarrow as pa

    from halfstep.train.data.tables import Table

__all__ = [
    "BUILT_IN",
    "BadRow",
    "DataFormat",
    "Examples",
    "TextRow",
    "bad_row_notes",
    "read_splits",
    "read_texts",
]

BUILT_IN = {"classify": "emotions", "ner": "entities"}
"""Task -> name of the data used without --data."""

_SPLITS = {
    "train": ("train", "training"),
    "dev": ("dev", "validation", "valid", "val"),
    "test": ("test",),
}
"""Split -> its names in folders and sets; the first that is there is used."""
_SHARD = re.compile(r"-\d+-of-\d+$")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
# To be raised when the rows read from the same file change.
_VERSION = 2
_CHUNK = 2000  # rows of one Arrow batch
_MAX_LISTED = 10  # bad rows, or names, in a message
# Share of sentences whose tags may be invalid: annotation mistakes, not a wrong format.
_MAX_INVALID_TAGS = 0.01
_INVALID_TAGS = "invalid tags"


class BadRow(NamedTuple):
    """A row that was left out."""

    where: str
    kind: str
    """Such as "blank text", to be counted."""
    fault: str


@dataclass(frozen=True)
class Examples:
    """The rows of one split, as read."""

    rows: datasets.Dataset
    """`text`, perhaps `text_pair`, then `label` (string, list of strings or float64)
    or, for ner, `spans`, and `line`. Memory-mapped; its fingerprint is a hash of the
    rows without `line`, the same for any file with these rows."""
    source: str
    """File, folder and split, or hub name and split, for messages."""
    notes: tuple[str, ...] = ()
    """What was chosen or left out, for the user."""
    unit: str = "line"
    """What `line` counts, from 1: "line" or "row"."""

    def where(self, i: int) -> str:
        """Return the location of a row, for messages."""
        return f"{self.source} {self.unit} {self.rows[i]['line']}"


class TextRow(NamedTuple):
    """A row to predict."""

    text: str
    text_pair: str | None
    columns: dict[str, Any]
    """The row's own columns, in their order, as they are in the file."""
    where: str


class _Source(NamedTuple):
    """What one split is read from."""

    name: str
    open: Callable[[], Iterable[Table]]
    """Opens the file, or the shards in order."""
    content: Callable[[], list[Any]]
    """Returns what determines the rows, or with --streaming names them."""


def read_splits(data: str | None, data_format: DataFormat) -> dict[str, Examples]:
    """Read the examples of --data, by split: "train", perhaps "dev" and "test".

    Args:
        data: A file (all of it is train), a folder with splits, a folder written by
            `save_to_disk`, or a hub name, `org/name` or `org/name:config`; None is the
            built-in data.
        data_format: How to read it.

    Raises:
        UserError: If something cannot be read, or a row cannot be used and
            `skip_bad_rows` is false.
    """
    if data is None:
        names = ("encoding", "delimiter", "text_columns", "label_column", "streaming")
        for name in names:
            if getattr(data_format, name):
                flag = f"--{name.removesuffix('s').replace('_', '-')}"
                message = f"{flag} is for --data; leave it out for the built-in texts."
                raise UserError(message)
        data = str(Path(__file__).parents[1] / BUILT_IN[data_format.task])
    sources = _sources(data, data_format)
    if "train" not in sources:
        nested = chain(Path(data).glob("*/*.txt"), Path(data).glob("*/*/*.txt"))
        if text_file := next(nested, None):
            raise UserError(
                f"{data} has no train split: {text_file} seems to be one text of many, "
                "and such folders are not read; save them as one table, such as "
                "train.csv, with the columns text and label."
            )
        there = sorted(path.name for path in Path(data).glob("*")) or [*sources]
        raise UserError(
            f"{data} has no train split: name a file train, with one of "
            f"{', '.join(tables.SUFFIXES[data_format.task])}, or a split of a saved "
            f"set; it holds {', '.join(there[:_MAX_LISTED]) or 'no file'}."
        )
    examples = {}
    notes: tuple[str, ...] = ()
    for split, source in sources.items():
        try:
            examples[split] = _read(source, data_format, split)
        except _UnlabelledError:
            notes = (f"{source.name} has no labels and is left out",)
    train = examples["train"]
    return examples | {"train": replace(train, notes=train.notes + notes)}


def read_texts(
    data: str, data_format: DataFormat, bad_rows: list[BadRow] | None = None
) -> Iterator[TextRow]:
    """Yield the texts of a file, or of a set with one split; labels may be absent.

    Args:
        data: As for `read_splits`.
        data_format: How to read it.
        bad_rows: With `skip_bad_rows`, rows that are left out are appended here.

    Raises:
        UserError: If something cannot be read, or a row cannot be used and
            `skip_bad_rows` is false.
    """
    sources = _sources(data, data_format)
    if len(sources) != 1:
        names = ", ".join(source.name for source in sources.values()) or "no split"
        raise UserError(f"{data} holds {names}; give one file.")
    count = 0
    for table in next(iter(sources.values())).open():
        # Predictions are written beside all columns.
        reader = row_reader(replace(table, select=None), data_format, needs_label=False)
        for line, row in reader.rows:
            where = f"{table.source} {table.unit} {line}"
            try:
                text, *pair = reader.texts(row)
            except RowError as error:
                bad_row = BadRow(where, error.kind, error.fault)
                if not data_format.skip_bad_rows:
                    raise _bad_rows_error(data, [bad_row]) from None
                if bad_rows is not None:
                    bad_rows.append(bad_row)
                continue
            count += 1
            yield TextRow(text, pair[0] if pair else None, reader.own(row), where)
            if count == data_format.limit:
                return
    if not count:
        raise UserError(f"{data} holds no texts.")


def _sources(data: str, data_format: DataFormat) -> dict[str, _Source]:
    """Find what each split is read from; open nothing but a saved or a hub set."""
    path = Path(data)
    if not os.path.lexists(path) and _is_hub_name(data):
        return _of_sets(data, _load_hub(data, data_format), data_format)
    if data_format.streaming:
        raise UserError(
            f"--streaming is for names on the hub, and {data} is on this machine; "
            "--limit reads no more than these rows of a file: leave --streaming out."
        )
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _of_sets(data, _load_saved(path), data_format)
    if not path.is_dir():
        return {"train": _of_files(data, [path], data_format)}
    sources = {}
    for split, names in _SPLITS.items():
        found = (_split_files(path, name, data_format.task) for name in names)
        if paths := next(filter(None, found), None):
            name = str(paths[0]) if len(paths) == 1 else f"{data} {split}"
            sources[split] = _of_files(name, paths, data_format)
    return sources


def _is_hub_name(data: str) -> bool:
    """Return whether a name, which is no file's, can be that of a hub set."""
    suffixes = {suffix for known in tables.SUFFIXES.values() for suffix in known}
    return (
        _HUB_NAME.fullmatch(data) is not None
        and text_files.suffix_of(Path(data)) not in suffixes
        and not Path(data).parent.exists()
    )


def _load_hub(data: str, data_format: DataFormat) -> dict[str, Any]:
    """Load a data set of the hub, without running code of it; return its splits."""
    import datasets

    if data_format.streaming and data_format.limit is None:
        raise UserError("--streaming needs --limit: the number of rows to fetch.")
    arrow_cache.silence()
    if process_group.rank() == 0:
        with contextlib.suppress(BrokenPipeError):
            print(f"loading {data} from the hub", file=sys.stderr, flush=True)  # noqa: T201
    name, _, config = data.partition(":")
    streaming = data_format.streaming
    try:
        return dict(datasets.load_dataset(name, config or None, streaming=streaming))
    except (
        *(OSError, ValueError, RuntimeError),
        datasets.exceptions.DatasetsError,
    ) as error:
        reason = tables.one_line(error)
        if isinstance(error, ConnectionError):
            reason += "; there is no file of that name either"
        elif "scripts are no longer supported" in reason:
            reason += ": code of a data set is never run; choose another, or a file"
        raise UserError(f"--data {data}: {reason}.") from error


def _load_saved(path: Path) -> dict[str, Any]:
    import datasets

    try:
        saved = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = tables.one_line(error)
        raise UserError(f"{path} is not as save_to_disk wrote it: {reason}.") from error
    return dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}


def _of_sets(
    data: str, sets: Mapping[str, Any], data_format: DataFormat
) -> dict[str, _Source]:
    sources = {}
    for split, names in _SPLITS.items():
        name = next((name for name in names if name in sets), None)
        if name is not None:
            sources[split] = _of_set(f"{data} {name}", sets[name], data_format)
    if not sources:
        message = f"{data} has the splits {', '.join(sets)}; one must be named train."
        raise UserError(message)
    return sources


def _of_set(name: str, data_set: Any, data_format: DataFormat) -> _Source:  # noqa: ANN401
    content = [name]
    if data_format.streaming:
        data_set = data_set.take(data_format.limit)
    else:
        content = [data_set._fingerprint]  # noqa: SLF001 - it has no public name
    return _Source(name, lambda: [tables.of_set(data_set, name)], lambda: content)


def _split_files(folder: Path, split: str, task: str) -> list[Path]:
    """Return the file of a split in a folder, or its shards in order."""
    paths: list[Path] = []
    # Where the hub's data sets have their files, too.
    for path in chain(
        folder.glob("*"), folder.glob("data/*"), folder.glob(f"{split}/*")
    ):
        stem = path.name.split(".")[0].lower()
        is_split = split in {stem, _SHARD.sub("", stem)} or path.parent.name == split
        is_known = text_files.suffix_of(path) in tables.SUFFIXES[task]
        if is_split and is_known and not path.is_dir():
            paths.append(path)
    paths = sorted(set(paths))
    are_shards = all(_SHARD.search(path.name.split(".")[0]) for path in paths)
    if len(paths) > 1 and not are_shards:
        message = f"{paths[0]} and {paths[1].name} are both {split}; keep one."
        raise UserError(message)
    return paths


def _of_files(name: str, paths: list[Path], data_format: DataFormat) -> _Source:
    for path in paths:
        tables.check_file(path, data_format.task)

    def stats() -> list[tuple[int, int]]:
        infos = [path.stat() for path in paths]
        return [(info.st_mtime_ns, info.st_size) for info in infos]

    before = stats()

    def content() -> list[str]:
        return [text_files.suffix_of(path) + _digest(path) for path in paths]

    def open_tables() -> Iterator[Table]:
        for path in paths:
            yield tables.open_file(path, data_format)
        if stats() != before:
            message = f"{name} changed while it was read; start when it is whole."
            raise UserError(message)

    return _Source(name, open_tables, content)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


class _UnlabelledError(Exception):
    """A test split has no labels."""


@dataclass
class _About:
    """What is stored beside the rows of a split."""

    rows: int = 0
    """Their number."""
    unit: str = "line"
    notes: list[str] = field(default_factory=list)
    """What was chosen or left out, without the name of the source."""
    fingerprint: str = ""


def _read(source: _Source, data_format: DataFormat, split: str) -> Examples:
    """Return the rows of a split, read now or found in the cache."""
    import datasets

    if split != "train" and not data_format.streaming:
        data_format = replace(data_format, limit=None)
    facts = [_VERSION, source.content(), asdict(data_format), split == "test"]
    path = arrow_cache.path_of(facts)
    stored = None if data_format.streaming else _load(path)
    if stored is None:
        _write(path, source, data_format, split)
        stored = _load(path)
    if stored is None:
        raise UserError(f"{path} was removed while in use; start again.")
    table, about = stored
    rows = datasets.Dataset(table, fingerprint=about.fingerprint)
    notes = tuple(f"{source.name}: {note}" for note in about.notes)
    return Examples(rows, source.name, notes, about.unit)


def _load(path: Path) -> tuple[Any, _About] | None:
    """Memory-map a cache entry; return None if it is absent or incomplete."""
    from datasets.table import MemoryMappedTable

    try:
        about = _About(**json.loads(path.with_suffix(".json").read_bytes()))
        table = MemoryMappedTable.from_file(str(path))
    except (OSError, ValueError, TypeError):  # Arrow's errors are among these
        return None
    return (table, about) if table.num_rows == about.rows else None


def _write(path: Path, source: _Source, data_format: DataFormat, split: str) -> None:
    """Write the rows of a split as a cache entry; raise if too many are bad."""
    import pyarrow as pa

    schema = _schema(data_format)
    facts = schema.remove(schema.get_field_index("line"))
    digest, about = hashlib.sha256(str(facts).encode()), _About()
    bad_rows: list[BadRow] = []
    every = _usable_rows(source, data_format, split, about, bad_rows)
    rows = islice(every, data_format.limit)
    chunks = iter(lambda: list(islice(rows, _CHUNK)), [])
    with arrow_cache.writing(path) as file, pa.ipc.new_stream(file, schema) as stream:
        for chunk in track(chunks, f"reading {source.name}", "rows"):
            columns = dict(zip(schema.names, zip(*chunk, strict=True), strict=True))
            batch = pa.RecordBatch.from_pydict(columns, schema)
            stream.write_batch(batch)
            # Line numbers do not change what the examples are.
            digest.update(batch.drop_columns(["line"]).serialize())
        _check_enough(source, data_format, split, about.rows, bad_rows)
    about.fingerprint = digest.hexdigest()
    about.notes += [
        note.removeprefix(f"{source.name}: ")
        for note in bad_row_notes(source.name, bad_rows)
    ]
    with arrow_cache.writing(path.with_suffix(".json")) as file:
        file.write(json.dumps(asdict(about)).encode())


def _schema(data_format: DataFormat) -> pa.Schema:
    """Return the normalised columns, `line` last."""
    import pyarrow as pa

    places = [("start", pa.int32()), ("end", pa.int32()), ("kind", pa.string())]
    targets = {
        "class": ("label", pa.string()),
        "multi_label": ("label", pa.list_(pa.string())),
        "regression": ("label", pa.float64()),
        "ner": ("spans", pa.list_(pa.struct(places))),
    }
    target = targets["ner" if data_format.task == "ner" else data_format.target]
    is_pair = len(data_format.text_columns or ()) > 1
    pair = [("text_pair", pa.string())] if is_pair else []
    return pa.schema([("text", pa.string()), *pair, target, ("line", pa.int32())])


def _usable_rows(
    source: _Source,
    data_format: DataFormat,
    split: str,
    about: _About,
    bad_rows: list[BadRow],
) -> Iterator[tuple[Any, ...]]:
    """Yield the values of the normalised columns; append the other rows to a list."""
    num_listed = 0
    for table in source.open():
        # Lines of several files would not say which one.
        is_shard = table.source != source.name
        about.unit = "row" if is_shard else table.unit
        place = f"{source.name} {Path(table.source).name}" if is_shard else source.name
        reader = row_reader(table, data_format, needs_label=split != "test")
        about.notes += {reader.note} - {"", *about.notes}
        for line, row in reader.rows:
            try:
                values = reader.values(row)
            except RowError as error:
                at = f"{place} {table.unit} {line}"
                bad_rows.append(BadRow(at, error.kind, error.fault))
                num_listed += error.kind != _INVALID_TAGS
                # All of a test split is read to see whether it has any labels.
                is_over = num_listed > _MAX_LISTED and split != "test"
                if is_over and not data_format.skip_bad_rows:
                    raise _bad_rows_error(source.name, bad_rows, "more than ") from None
                continue
            about.rows += 1
            yield (*values, about.rows if is_shard else line)


def _check_enough(
    source: _Source,
    data_format: DataFormat,
    split: str,
    num_rows: int,
    bad_rows: list[BadRow],
) -> None:
    """Raise if the rows that can be used are too few."""
    kinds = {row.kind for row in bad_rows}
    if split == "test" and not num_rows and "missing label" in kinds:
        raise _UnlabelledError  # as where they are secret
    most = _MAX_INVALID_TAGS * (num_rows + len(bad_rows))
    are_few = kinds == {_INVALID_TAGS} and len(bad_rows) <= most
    if bad_rows and not (are_few or data_format.skip_bad_rows):
        raise _bad_rows_error(source.name, bad_rows)
    if not num_rows:
        first = [
            f", as in{row.where.removeprefix(source.name)}: {row.fault}"
            for row in bad_rows[:1]
        ]
        raise UserError(f"{source.name} holds no usable rows{''.join(first)}.")


def _bad_rows_error(source: str, bad_rows: list[BadRow], more: str = "") -> UserError:
    """Return one error for rows that cannot be used; it lists the first ten."""
    places: dict[str, list[str]] = {}
    for where, _, fault in bad_rows[:_MAX_LISTED]:
        places.setdefault(fault, []).append(where.removeprefix(source).strip())
    listed = "; ".join(f"{', '.join(at)}: {fault}" for fault, at in places.items())
    if len(bad_rows) == 1:
        start, them = f"{source} {listed}", "it"
    else:
        count = f"{more}{_MAX_LISTED}" if more else len(bad_rows)
        start, them = f"{source}: {count} rows cannot be used: {listed}", "them"
    return UserError(f"{start}; fix {them}, or leave {them} out with --skip-bad-rows.")


def bad_row_notes(source: str, bad_rows: Sequence[BadRow]) -> tuple[str, ...]:
    """Return a note that counts rows left out by kind, with the first of each."""
    if not bad_rows:
        return ()
    first = {row.kind: row for row in reversed(bad_rows)}
    counts = Counter(row.kind for row in bad_rows).most_common()
    kinds = "; ".join(
        f"{count} with {kind} (first: {first[kind].where.removeprefix(source).strip()}"
        f": {first[kind].fault})"
        for kind, count in counts
    )
    return (f"{source}: {format_count(len(bad_rows), 'row')} left out: {kinds}",)
