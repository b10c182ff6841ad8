"""Files, folders and data sets: what is read from them, and what each refusal says."""

import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from data_files import in_tmp_path, refused, write  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from halfstep.errors import UserError
from halfstep.train.data.source import (
    BadRow,
    DataFormat,
    Examples,
    read_splits,
    read_texts,
)

PAIRS = [("so good", "like"), ("so bad, so sad", "sad"), ("fine", "like")]
OBJECTS = [{"text": text, "label": label} for text, label in PAIRS]
LINES = "".join(f"{json.dumps(row)}\n" for row in OBJECTS)
NER = DataFormat(task="ner")


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("datasets")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


def refused_rows(name: str, **format_: Any) -> str:
    """Return the one line that lists the bad rows of a file."""
    with pytest.raises(UserError) as caught:
        read(name, **format_)
    line = str(caught.value)
    assert "\n" not in line
    return line


def table(
    delimiter: str = ",", head: tuple[str, ...] = ("text", "label"), rows: Any = PAIRS
) -> str:
    file = io.StringIO()
    # Older csv modules quote a carriage return only if it is a part of line ends.
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\r\n")
    writer.writerows([head, *rows] if head else rows)
    return file.getvalue()


def read(name: str, **format_: Any) -> Examples:
    return read_splits(name, DataFormat(**format_))["train"]


def rows_of(examples: Examples, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[n] for n in names or ("text", "label")) for row in examples.rows]


def arrow(**columns: list[Any]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.table(columns), sink)
    return sink.getvalue()


TEXTS, LABELS = map(list, zip(*PAIRS, strict=True))
SHAPES: dict[str, str | bytes] = {
    "a.csv": table(),
    "crlf.csv": table().replace("\n", "\r\n"),
    "bom.csv": b"\xef\xbb\xbf" + table().encode(),
    "blank.csv": "\n\n" + table().replace("\n", "\n \n"),
    "semicolons.csv": table(";"),
    "tabs.csv": table("\t"),
    "a.TSV": table("\t"),
    "tabs.txt": table("\t"),
    "pipes.txt": table("|"),
    "swapped.csv": table(head=("Label ", "TEXT"), rows=[pair[::-1] for pair in PAIRS]),
    "more.csv": table(head=("id", "text", "label"), rows=[(7, *p) for p in PAIRS]),
    "headless.csv": table(head=()),
    "usual.csv": table(head=("Review", "Stars")),
    "other.csv": table(head=("phrase", "sentiment")),
    "fasttext.txt": "".join(f"__label__{label} {text}\n" for text, label in PAIRS),
    "array.json": json.dumps(OBJECTS),
    "indented.json": json.dumps(OBJECTS, indent=2),
    "data.json": json.dumps({"version": [1], "data": OBJECTS}),
    "pairs.json": json.dumps(PAIRS),
    "lines.json": LINES,
    "a.jsonl": LINES.replace("\n", "\n\n"),
    "a.NDJSON": LINES,
    "a.parquet": arrow(text=TEXTS, label=LABELS),
}
"""Files that hold `PAIRS`."""


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_read_alike(name: str, zipped: bool) -> None:
    """Law: format, delimiter, header and compression change no text and no label."""
    content = SHAPES[name]
    data = content if isinstance(content, bytes) else content.encode()
    if name == "data.json":
        data = data.replace(b"[1]", b"1")
    path = write(name + ".gz" * zipped, gzip.compress(data) if zipped else data)
    examples = read(str(path))
    assert rows_of(examples) == PAIRS
    named = name in {"usual.csv", "other.csv"}
    assert [note[: len(str(path))] for note in examples.notes] == [str(path)] * named
    same = read(str(write("same.csv", table())))
    assert examples.rows._fingerprint == same.rows._fingerprint


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
words = texts.map(str.strip).filter(bool)
pairs = st.lists(st.tuples(texts.filter(str.strip), words), min_size=1, max_size=5)


@given(pairs, st.sampled_from(",\t;|"))
@settings(max_examples=40, deadline=None)
def test_tables_read_what_csv_writes(rows: list[tuple[str, str]], mark: str) -> None:
    """Law: a table that the csv module writes is read back, and each row's line."""
    name = str(write("a.csv", table(mark, rows=rows)))
    examples = read(name, delimiter=mark)
    assert rows_of(examples) == rows
    lines = [2]
    for row in rows:
        lines.append(lines[-1] + table(mark, (), [row]).count("\n"))
    assert [line for (line,) in rows_of(examples, "line")] == lines[:-1]


@given(pairs, st.sampled_from([None, 1]))
@settings(max_examples=40, deadline=None)
def test_json_and_parquet_read_what_is_written(
    rows: list[tuple[str, str]], indent: int | None
) -> None:
    """Law: JSON, its lines and parquet are read as they were written."""
    objects = [{"text": text, "label": word} for text, word in rows]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in objects)
    columns = {key: [row[key] for row in objects] for key in ("text", "label")}
    files = {"a.json": json.dumps(objects, indent=indent), "a.jsonl": lines}
    for name, content in (files | {"a.parquet": arrow(**columns)}).items():
        examples = read(str(write(name, content)))
        assert rows_of(examples) == rows
        places = [number for (number,) in rows_of(examples, "line")]
        assert places == list(range(1, len(rows) + 1))


def test_values_are_not_interpreted() -> None:
    """Law: what other readers take for missing, numbers or booleans are words."""
    rows = [("NA", "007"), ("null", "1.0"), ("True", "NaN"), ("nan", "None")]
    assert rows_of(read(str(write("a.csv", table(rows=rows))))) == rows
    content = "".join(
        json.dumps({"text": "x", "label": value}) + "\n"
        for value in [1, 1.0, 0.5, -0.0, True, " 1.0 "]
    )
    labels = [label for _, label in rows_of(read(str(write("a.jsonl", content))))]
    assert labels == ["1", "1", "0.5", "0", "true", "1.0"]


def test_a_row_knows_where_it_is() -> None:
    """Law: a row's place is the line where it starts; in parquet, its number."""
    lines = read(str(write("a.csv", '\ntext,label\n"two\nlines",a\nx,0\n')))
    assert [lines.where(i) for i in (0, 1)] == ["a.csv line 3", "a.csv line 5"]
    rows = read(str(write("a.parquet", arrow(text=["x", "y"], label=[1, 2]))))
    assert rows.where(1) == "a.parquet row 2"


CHINESE = [("今天天气真好，我们去公园玩吧", "高兴"), ("我真的很难过", "悲伤")]
TAIWAN = [("今天天氣真好，我們去公園玩吧", "高興"), ("我真的很難過", "悲傷")]
FRENCH = [("déjà vu, c'est très bon", "bien"), ("pas très bon", "mal")]
ENCODED = [
    ("gb18030", "gb18030", CHINESE),
    ("gbk", "gb18030", [(f"film {i}，好", "like") for i in range(9)]),
    ("big5", "big5", TAIWAN),
    ("utf-16", "utf-16", FRENCH),
    ("utf-16-le", "utf-16-le", PAIRS),
    ("utf-16-be", "utf-16-be", CHINESE),
    ("utf-32", "utf-32", PAIRS),
    ("latin-1", "cp1252", FRENCH),
    ("shift_jis", None, [("今日はとても良い天気ですね", "良い")]),
]


@pytest.mark.parametrize(("encoding", "seems", "rows"), ENCODED)
def test_encodings(encoding: str, seems: str | None, rows: list[Any]) -> None:
    """Law: another encoding than UTF-8 is named with its flag, and read with it."""
    name = str(write("a.csv", table(rows=rows).encode(encoding)))
    line = refused(read, name)
    flag = f"--encoding {seems}." if seems else "give its encoding as --encoding."
    assert line.startswith("a.csv ")
    assert line.endswith(flag)
    assert rows_of(read(name, encoding=encoding)) == rows


def test_a_mark_of_utf8_is_no_text() -> None:
    """Law: a byte-order mark is not part of the first name, with --encoding or not."""
    write("a.csv", SHAPES["bom.csv"])
    for encoding in (None, "utf8", "utf-8-sig"):
        assert rows_of(read("a.csv", encoding=encoding)) == PAIRS


def test_a_wrong_encoding_is_located() -> None:
    """Law: the first byte that cannot be decoded is named, and its line."""
    good = table().encode() * 30_000
    write("a.csv", good + "é,x\n".encode("latin-1"))
    line = good.count(b"\n") + 1
    at = f"a.csv line {line} is not UTF-8: byte 0xe9; it seems to be cp1252: give "
    assert refused(read, "a.csv").startswith(at)
    write("b.csv", table(rows=FRENCH))
    line = refused(read, "b.csv", encoding="ascii")
    assert line.endswith("it seems to be utf-8: give --encoding utf-8.")
    assert "utf-8" in refused(read, "b.csv", encoding="utf-16")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_columns_are_chosen_by_name(name: str) -> None:
    """Law: columns are found by name in either case; two are a pair of sentences."""
    values = {"id": ["7"], "Review": ["so good"], "title": ["yes"], "stars ": ["5"]}
    row = {name: value[0] for name, value in values.items()}
    content = {
        "a.csv": table(head=tuple(values), rows=[row.values()]),
        "a.jsonl": json.dumps(row),
        "a.parquet": arrow(**values),
    }
    write(name, content[name])
    assert rows_of(read(name, text_columns=("review",), label_column="Stars")) == [
        ("so good", "5")
    ]
    pair = read(name, text_columns=("title", "Review"), label_column="id")
    assert rows_of(pair, "text", "text_pair", "label") == [("yes", "so good", "7")]
    line = refused(read, name, text_columns=("reveiw",), label_column="id")
    assert line.endswith("no column has that name; nearest: 'Review'.")
    assert "is both text and label" in refused(
        read, name, text_columns=("id",), label_column="ID"
    )


def test_dotted_columns_reach_into_objects() -> None:
    """Law: `a.b` is key b of the object a, in JSON and in structs of parquet."""
    rows = [{"review": {"body": "good", "n": 1}, "stars": 5}, {"stars": 1}]
    write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write("a.parquet", arrow(review=[{"body": "good", "n": 1}, None], stars=[5, 1]))
    chosen = {"text_columns": ("review.body",), "skip_bad_rows": True}
    for name in ("a.jsonl", "a.parquet"):
        examples = read(name, **chosen)
        assert rows_of(examples) == [("good", "5")]
        assert "1 with missing text" in examples.notes[-1]
        line = refused(read, name)
        assert "'review.body'" in line
        assert line.endswith("choose with --text-column.")


NUMBERED = "".join(f'"{1 + i % 2}","{i}","user","text {i}"\n' for i in range(9))
LABEL_FIRST = "".join(f"{'spam' if i % 3 else 'ham'}\ttext {i}\n" for i in range(12))
NO_HEADER = "Phrase,Mood\n" + "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(9))


def test_tables_without_a_header() -> None:
    """Law: two columns are told by their values, of more the numbers are asked for."""
    examples = read(str(write("sms.tsv", LABEL_FIRST)))
    assert rows_of(examples)[0] == ("text 0", "ham")
    assert "label from column 1, text from column 2" in examples.notes[0]
    assert rows_of(read("sms.tsv", limit=2)) == rows_of(examples)[:2]
    write("many.csv", NUMBERED)
    assert "by number from 1" in refused(read, "many.csv")
    line = refused(read, "many.csv", text_columns=("body",))
    assert line.endswith("without a header, give its number, from 1.")
    chosen = read("many.csv", text_columns=("4",), label_column="1")
    assert rows_of(chosen)[:2] == [("text 0", "1"), ("text 1", "2")]


def test_headers_with_other_names() -> None:
    """Law: what may be a header or a row is asked about."""
    line = refused(read, str(write("a.csv", NO_HEADER)))
    assert line.startswith("a.csv line 1: label 'Mood' is in no other of the first 10")


BAD_TABLE = 'text,label\ngood,1\n  ,2\nbad,\nx,y,z\n"open,1\nfine,3\n"a"b,1\nlast,2\n'
BAD_LINES = """\
{"text": "good", "label": 1}
{"text": "b"}
{"text": "b", "label": NaN}
{"text": 5, "label": 1}
{"text": "x"
[1]
{"text": "\\ud800", "label": 1}
{"text": "\\u0000", "label": 1}
{"label": 1}
{"text": "a", "text": "b", "label": 1}
{"text": "e", "label": [1]}
"""
BAD = [
    ("a.csv", BAD_TABLE, "34568", {"broken row": 3, "blank text": 1}),
    ("a.tsv", BAD_TABLE.replace(",", "\t"), "345", {"broken row": 1, "blank text": 1}),
    ("a.jsonl", BAD_LINES, "23456789", {"invalid text": 3, "broken JSON": 2}),
]


@pytest.mark.parametrize(("name", "content", "lines", "kinds"), BAD)
def test_bad_rows_are_listed_or_left_out(
    name: str, content: str, lines: str, kinds: dict[str, int]
) -> None:
    """Law: one message lists up to ten bad rows; with the flag, each kind is counted.

    A stray quote costs its own line alone; in a table with tabs it is a character.
    """
    write(name, content)
    line = refused_rows(name)
    assert line.startswith(f"{name}: ")
    assert all(f"line {number}" in line for number in lines)
    assert line.endswith("or leave them out with --skip-bad-rows.")
    examples = read(name, skip_bad_rows=True)
    assert rows_of(examples)[0] == ("good", "1")
    (note,) = examples.notes
    for kind, count in kinds.items():
        assert f"{count} with {kind} (first: line" in note


def test_many_bad_rows() -> None:
    """Law: reading ends at the eleventh bad row; equal faults are said once."""
    write("a.csv", "text,label\n" + "x\n" * 30)
    line = refused_rows("a.csv")
    assert line.startswith("a.csv: more than 10 rows cannot be used: line 2, line 3")
    assert line.count("cell count is 1, but 2 in line 1") == 1
    assert refused(read, "a.csv", skip_bad_rows=True).startswith(
        "a.csv holds no usable rows, as in line 2"
    )


WRONG: dict[str, tuple[str | bytes, str]] = {
    "a.csv": ("", "holds no usable rows"),
    "b.csv": ("text,label\n", "holds no usable rows"),
    "c.csv": ("x\ny\n", 'line 1: "x" is the only cell'),
    "d.csv": ("text,label,Text \nx,1,y\n", "text could be column 'text', 'Text'"),
    "e.csv": ("review,content,label\nx,y,1\n", "column 'review', 'content'; choose"),
    "f.csv": (b"PK\x03\x04\x14\0\6\0\xff", "is a zip archive or an Excel workbook"),
    "g.csv.gz": (gzip.compress(b"x,y\n" * 999)[:-9], "cannot be read: "),
    "a.json": ("[]", "holds no usable rows"),
    "b.json": ('[{"text": "a", "label": 1},\n {"text"}]', "broken JSON at line 2 colu"),
    "c.json": ('{"text": {"0": "x"}}', "holds no JSON array; save one"),
    "d.json": ('[{"text": "a", "label": 1}] 5', "Extra data"),
    "e.json": ("[1]", "1 is no JSON object"),
    "f.json": ("[" * 100_000, "the nesting too deep"),
    "a.parquet": ("PAR1", "is no parquet file: "),
    "a.xlsx": ("", "suffix '.xlsx' is unknown for --task classify"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_cannot_be_used(name: str) -> None:
    """Law: one line names the file and what is wrong with it."""
    content, fault = WRONG[name]
    line = refused(read, str(write(name, content)))
    assert line.startswith(name)
    assert fault in line


def test_what_is_no_file() -> None:
    """Law: a path that is not there names the nearest; a pipe is not opened."""
    write("posts.csv", table())
    assert refused(read, "post.csv") == "post.csv is not there; nearest: posts.csv."
    assert "nearest" not in refused(read, "nothing/posts.csv")
    os.mkfifo("pipe.csv")
    assert refused(read, "pipe.csv").startswith("pipe.csv is a pipe or a device")
    assert "leave --streaming out" in refused(read, "posts.csv", streaming=True)
    assert refused(read_splits, None, DataFormat(encoding="ascii")).startswith(
        "--encoding is for --data"
    )


def test_folders_have_splits() -> None:
    """Law: a folder's files are splits by name, of any format; shards are in order."""
    write("f/train.csv", table())
    write("f/valid.jsonl", LINES)
    write("f/notes.csv", "q,q\n")
    splits = read_splits("f", DataFormat(limit=2))
    sizes = {name: len(each.rows) for name, each in splits.items()}
    assert sizes == {"train": 2, "dev": 3}
    assert splits["train"].where(0) == "f/train.csv line 2"
    for i, pair in enumerate(PAIRS):
        columns = {"text": [pair[0]], "label": [pair[1]]}
        Path("s/data").mkdir(parents=True, exist_ok=True)
        write(f"s/data/train-0000{i}-of-00003.parquet", arrow(**columns))
    examples = read("s")
    assert rows_of(examples) == PAIRS
    assert examples.where(2) == "s train row 3"
    write("f/train.tsv", "x\ty\n")
    assert "are both train; keep one" in refused(read, "f")
    write("g/posts.csv", table())
    assert "no train split: name a file train" in refused(read, "g")
    assert refused(read, "g").endswith("it holds posts.csv.")
    for name in ("imdb/train/pos/0.txt", "imdb/train/neg/0.txt"):
        write(name, "a film")
    for name in ("imdb", "imdb/train"):
        assert "0.txt seems to be one text of many" in refused(read, name)


def data_set(labels: list[int] | None = None) -> datasets.Dataset:
    classes = datasets.ClassLabel(names=["like", "sad"])
    features = datasets.Features({"text": datasets.Value("string"), "label": classes})
    columns = {"text": TEXTS, "label": labels or [0, 1, 0]}
    return datasets.Dataset.from_dict(columns, features=features)


def test_saved_sets() -> None:
    """Law: what `save_to_disk` wrote is read; classes have their names.

    A test split whose labels are secret is left out, and that is said.
    """
    data_set().save_to_disk("one")
    examples = read("one")
    assert rows_of(examples) == PAIRS
    assert examples.where(0) == "one train row 1"
    splits = {"train": data_set(), "validation": data_set(), "test": data_set([-1] * 3)}
    datasets.DatasetDict(splits).save_to_disk("all")
    read_ = read_splits("all", DataFormat())
    assert list(read_) == ["train", "dev"]
    assert read_["train"].notes == ("all test has no labels and is left out",)
    data_set().to_parquet("named.parquet")
    assert rows_of(read("named.parquet")) == PAIRS


def test_a_test_file_without_labels_is_left_out() -> None:
    write("k/train.csv", table())
    write("k/test.csv", "id,text\n1,x\n")
    splits = read_splits("k", DataFormat())
    assert list(splits) == ["train"]
    assert "k/test.csv has no labels" in splits["train"].notes[0]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Let names of the hub be folders here; return what was asked for."""
    load, asked = datasets.load_dataset, []

    def load_dataset(name: str, *args: Any, **more: Any) -> Any:
        asked.append((name, *args))
        return load(f"hub-{name.replace('/', '-')}", *args, **more)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_names(hub: list[tuple[Any, ...]], streaming: bool) -> None:
    """Law: `org/name:config` is loaded with that configuration, whole or streamed."""
    for name in ("train", "validation"):
        write(f"hub-org-posts/{name}.parquet", SHAPES["a.parquet"])
    how = DataFormat(streaming=streaming, limit=2)
    splits = read_splits("org/posts:default", how)
    assert hub == [("org/posts", "default")]
    assert rows_of(splits["train"]) == PAIRS[:2]
    assert splits["train"].where(1) == "org/posts:default train row 2"
    assert len(splits["dev"].rows) == (2 if streaming else 3)


def test_hub_names_that_cannot_be_loaded(hub: list[tuple[Any, ...]]) -> None:
    """Law: a set that has code, or cannot be reached, is refused in one line."""
    write("hub-org-code/hub-org-code.py", "open('trace', 'w')")
    line = refused(read, "org/code")
    assert line.startswith("--data org/code: ")
    assert "code of a data set is never run" in line
    assert not Path("trace").exists()
    assert refused(read, "org/code", streaming=True).startswith("--streaming needs")
    assert hub == [("org/code", None)]


def test_a_hub_that_cannot_be_reached() -> None:
    line = refused(read, "org/posts")
    assert line.startswith("--data org/posts: Couldn't reach ")
    assert line.endswith("there is no file of that name either.")


def test_streaming_fetches_no_more_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: with --streaming, only the rows of --limit are asked for."""
    fetched = []

    def rows() -> Iterator[dict[str, str]]:
        for number in range(1000):
            fetched.append(number)
            yield {"text": f"t{number}", "label": "ab"[number % 2]}

    def load(*_: Any, **__: Any) -> Any:
        return {"train": datasets.IterableDataset.from_generator(rows)}

    monkeypatch.setattr(datasets, "load_dataset", load)
    examples = read("org/big", streaming=True, limit=5)
    assert [text for (text,) in rows_of(examples, "text")] == [
        f"t{i}" for i in range(5)
    ]
    assert len(fetched) <= 6


def test_a_stream_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a fault while rows are fetched names the set and the last row."""

    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "x", "label": "a"}
        raise ConnectionError("the hub\nhung up")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": stream})
    line = refused(read, "org/broken", streaming=True, limit=5)
    assert line == "org/broken train cannot be read after row 1: the hub hung up."


def test_targets() -> None:
    """Law: labels are one word, several, or a finite number, as is asked."""
    write(
        "a.jsonl", '{"text": "x", "label": ["a", "b", "a"]}\n{"text": "y", "label": []}'
    )
    several = read("a.jsonl", target="multi_label")
    assert rows_of(several, "label") == [(["a", "b"],), ([],)]
    write("a.csv", "text,label\nx,a| b\ny,\n")
    cells = read("a.csv", target="multi_label", label_separator="|", delimiter=",")
    assert rows_of(cells, "label") == [(["a", "b"],), ([],)]
    write("j.csv", 'text,label\nx,"[""a, b"", ""c""]"\ny,[]\nz,[a]\n')
    arrays = read("j.csv", target="multi_label")
    assert rows_of(arrays, "label") == [(["a, b", "c"],), ([],), (["[a]"],)]
    write("b.txt", "__label__a __label__b x\n__label__c y\n")
    assert rows_of(read("b.txt", target="multi_label"), "text", "label") == [
        ("x", ["a", "b"]),
        ("y", ["c"]),
    ]
    write("c.csv", "text,label\nx,1.5\ny,-2e3\n")
    assert rows_of(read("c.csv", target="regression"), "label") == [(1.5,), (-2000.0,)]
    for word in ("inf", "1e300", "nan"):
        write("d.csv", f"text,label\nx,1.5\ny,{word}\n")
        message = refused(read, "d.csv", target="regression")
        assert f'line 3: label is "{word}"; --regression needs' in message


TAGGED = "Ada B-PER\nin O\nBonn B-LOC\n\n"
SPANS = [{"start": 0, "end": 3, "kind": "PER"}, {"start": 7, "end": 11, "kind": "LOC"}]
TOKENS = {"tokens": ["Ada", "in", "Bonn"], "ner_tags": ["B-PER", "O", "B-LOC"]}
OFFSETS = {"text": "Ada in Bonn", "entities": [[0, 3, "PER"], [7, 11, "LOC"]]}
ENTITIES: dict[str, str | bytes] = {
    "a.bio": TAGGED,
    "a.conll": TAGGED,
    "a.tsv": TAGGED.replace(" ", "\t"),
    "a.txt.gz": gzip.compress(TAGGED.encode()),
    "tokens.jsonl": json.dumps(TOKENS),
    "offsets.json": json.dumps([OFFSETS]),
    "spacy.json": json.dumps([[OFFSETS["text"], {"entities": OFFSETS["entities"]}]]),
    "a.parquet": arrow(**{key: [value] for key, value in TOKENS.items()}),
}


@pytest.mark.parametrize("name", ENTITIES)
def test_entities(name: str) -> None:
    """Law: tagged lines and annotated rows of every format are texts and spans."""
    write(name, ENTITIES[name])
    examples = read_splits(name, NER)["train"]
    assert rows_of(examples, "text", "spans") == [("Ada in Bonn", SPANS)]


def test_tags_have_the_names_of_their_own_column() -> None:
    """Law: numbers as tags are named by their column, not by that of another."""
    names = {"pos_tags": ["NN", "IN", "VB"], "ner_tags": ["O", "B-PER", "B-LOC"]}
    lists = {
        key: datasets.List(datasets.ClassLabel(names=value))
        for key, value in names.items()
    }
    features = {"tokens": datasets.List(datasets.Value("string")), **lists}
    columns = {"tokens": [TOKENS["tokens"]], "pos_tags": [[0, 1, 0]]}
    columns["ner_tags"] = [[1, 0, 2]]
    saved = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    saved.save_to_disk("ner")
    examples = read_splits("ner", NER)["train"]
    assert rows_of(examples, "text", "spans") == [("Ada in Bonn", SPANS)]


@pytest.mark.parametrize(("good", "read_"), [(98, False), (99, True)])
def test_one_sentence_in_a_hundred_may_have_invalid_tags(
    good: int, read_: bool
) -> None:
    """Law: up to a hundredth of the sentences are left out for their tags, and said."""
    write("a.bio", TAGGED * good + "x O\ny I-PER\n\n")
    if not read_:
        line = refused(read_splits, "a.bio", NER)
        assert line.startswith(f"a.bio line {good * 4 + 2}: tag 'I-PER' ")
        return
    examples = read_splits("a.bio", NER)["train"]
    assert len(examples.rows) == good
    assert "1 row left out: 1 with invalid tags" in examples.notes[0]


def test_the_second_read_is_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: same content and format are read once, from any place; others anew.

    An entry that is damaged is written again, and what a killed process left is
    removed; rows that were left out stay known.
    """
    opened: list[Any] = []
    parse: Callable[..., Any] = csv.reader

    def count(*args: Any, **more: Any) -> Any:
        opened.append(args)
        return parse(*args, **more)

    write("a.csv", table() + "x\n")
    first = read("a.csv", skip_bad_rows=True)
    monkeypatch.setattr(csv, "reader", count)
    Path("moved").mkdir()
    Path("a.csv").rename("moved/a.csv")
    second = read("moved/a.csv", skip_bad_rows=True)
    assert not opened
    assert second.rows._fingerprint == first.rows._fingerprint
    (note,) = second.notes
    assert note.startswith(
        "moved/a.csv: 1 row left out: 1 with broken row (first: line"
    )
    entry = Path(second.rows.cache_files[0]["filename"])
    entry.write_bytes(entry.read_bytes()[:-200])
    left = entry.with_name(f"{entry.stem}-killed.part")
    left.touch()
    os.utime(left, (0, 0))
    assert rows_of(read("moved/a.csv", skip_bad_rows=True)) == PAIRS
    assert opened
    assert not left.exists()
    opened.clear()
    read("moved/a.csv", skip_bad_rows=True, limit=1)
    assert opened


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where the rows cannot be stored, the variable that moves them is named."""
    Path("file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("file"))
    line = refused(read, str(write("new.csv", table(rows=[("new", "1")]))))
    assert "set HF_DATASETS_CACHE to a writable folder" in line


def test_texts_to_predict() -> None:
    """Law: labels may be absent, and each row keeps its own columns in their order."""
    write("a.csv", "id,review,note\n1,so good,x\n2,so bad,y\n")
    first, second = read_texts("a.csv", DataFormat())
    assert first.columns == {"id": "1", "review": "so good", "note": "x"}
    assert (second.text, second.text_pair, second.where) == (
        "so bad",
        None,
        "a.csv line 3",
    )
    write("twice.csv", "id,text,id\n1,x,2\n")
    (row,) = read_texts("twice.csv", DataFormat())
    assert row.columns == {"id": "1", "text": "x", "id.1": "2"}
    write("lines.txt", "so good\nso bad\n")
    assert [row.text for row in read_texts("lines.txt", DataFormat())] == [
        "so good",
        "so bad",
    ]
    write("a.parquet", arrow(id=[1], text=["x"]))
    (row,) = read_texts("a.parquet", DataFormat())
    assert row.columns == {"id": 1, "text": "x"}
    write("n.jsonl", json.dumps({"tokens": TOKENS["tokens"]}))
    write("n.bio", TAGGED)
    for name in ("n.jsonl", "n.bio"):
        assert [row.text for row in read_texts(name, NER)] == ["Ada in Bonn"]


def test_bad_texts_to_predict() -> None:
    write("a.csv", "id,text\n1,x\n2, \n3,y\n")
    with pytest.raises(UserError, match=r"^a.csv line 3: text is blank; fix it, or"):
        list(read_texts("a.csv", DataFormat()))
    bad: list[BadRow] = []
    rows = list(read_texts("a.csv", DataFormat(skip_bad_rows=True), bad))
    assert [row.text for row in rows] == ["x", "y"]
    assert bad == [BadRow("a.csv line 3", "blank text", "text is blank")]
    write("f/train.csv", table())
    write("f/dev.csv", table())
    with pytest.raises(UserError, match="give one file"):
        next(read_texts("f", DataFormat()))
