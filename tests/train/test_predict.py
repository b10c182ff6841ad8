"""Predictions of a finished run: in order, the same in any batch; what is rejected."""

import io
import itertools
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_files import refused
from safetensors.torch import load_file, save_file
from small_corpora import letters_tokenizer
from small_training import letters, seal_again, small_settings
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    pipeline,
)

from halfstep.train import predict as predicting
from halfstep.train.config import TrainConfig
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.predict import Predictor, check_texts, line_rows, text_rows
from halfstep.train.run import load_corpus, run

pytestmark = pytest.mark.usefixtures("small_runs")

NAMES = ("rain", "晴")
COLUMNS = ["label", *(f"p({name})" for name in NAMES)]
LONGEST = 24
CLOSE = 1e-5  # sums of fp32 in another order, through a layer and its norms
FAST, SLOW = ({"fp32": 1.0, "bf16": rate, "fp16": rate} for rate in (2.0, 0.5))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run that tells two alphabets apart, half trained."""
    folder = tmp_path_factory.mktemp("predict")
    rows = letters(120, "defxy", "abcxy", lengths=(2, 30))
    lines = ["text,label\n", *(f"{row},{NAMES[label]}\n" for row, label in rows)]
    (folder / "letters.csv").write_text("".join(lines), encoding="utf-8")
    more = {"dev_share": 0.25, "max_length": LONGEST, "level": "O0", "batch_size": 32}
    more |= {"lr": 1e-3, "epochs": 2}
    return run(small_settings(folder, folder / "letters.csv", **more)).folder.path


@pytest.fixture(scope="module")
def predictor(finished: Path) -> Predictor:
    return Predictor(finished)


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def plain_run(path: Path, task: str, kind: Any, *names: str) -> Path:
    """Write a run whose model is a BERT with random weights."""
    torch.manual_seed(0)
    shape = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    shape |= {"hidden_size": 8, "vocab_size": 8, "intermediate_size": 8}
    network = kind(BertConfig(**shape, id2label=dict(enumerate(names))))
    torch.nn.init.normal_(network.classifier.weight)
    network.classifier.bias.data[2:] = -1e3  # no tag I: any sequence is valid
    folder = RunFolder(path)
    folder.begin({"task": task}, overwrite=False)
    folder.save_model(network, letters_tokenizer("abc", 8))
    return path


class Copyist(torch.nn.Module):
    """A model by which b begins an entity, c goes on with it, and a is outside."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        del attention_mask
        tags = (input_ids - 5).clamp(0, 2)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(tags, 3).float())


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    names = ("O", "B-PER", "I-PER")
    return plain_run(tmp_path / "ner", "ner", BertForTokenClassification, *names)


@pytest.fixture
def tagger(tagged: Path, monkeypatch: pytest.MonkeyPatch) -> Predictor:
    """Return what finds entities by the rule of `Copyist`."""
    made = Predictor(tagged)
    monkeypatch.setattr(made, "_model", Copyist(made._model.config))
    return made


def test_form(predictor: Predictor) -> None:
    """Law: each text has a label and the probability of each class, which add to 1."""
    texts = ["abc", "defdef", "  abc  ", "天"]
    found = list(predictor.predict(texts))
    assert len(found) == len(texts)
    for each in found:
        assert list(each) == COLUMNS
        label, *shares = each.values()
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert label == NAMES[shares.index(max(shares))]
    assert found[0] == pytest.approx(found[2])
    assert list(predictor.predict([])) == []


def test_batches_do_not_matter(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a text has the same prediction alone and among many, shorter and longer.

    Each is counted once as it is done.
    """
    monkeypatch.setattr(predicting, "_CHUNK", 131)
    monkeypatch.setattr(predicting, "_BATCH_TOKENS", {"cpu": 200})
    texts = ["abcdef"[: 1 + n % 6] * (1 + n % 7) for n in range(300)]
    done: list[int] = []
    chunks = list(predictor.predict_rows(text_rows(texts), done.append))
    assert [len(rows) for rows, _, _ in chunks] == [131, 131, 38]
    assert sum(done) == len(texts)
    together = [each for _, predictions, _ in chunks for each in predictions]
    for number in (0, 5, 130, 131, len(texts) - 1):
        (alone,) = predictor.predict([texts[number]])
        assert alone == pytest.approx(together[number], abs=CLOSE)


def test_lazy(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: texts without end have predictions, read one chunk ahead of them.

    Gradients stay on for a program that trains meanwhile.
    """
    monkeypatch.setattr(predicting, "_CHUNK", 4)
    read = itertools.count()
    endless = ("ab" * (1 + next(read) % 3) for _ in itertools.repeat(None))
    predictions = predictor.predict(endless)
    assert next(read) == 0
    assert len(list(itertools.islice(predictions, 5))) == 5
    assert next(read) == 1 + 3 * 4
    assert torch.is_grad_enabled()


def test_the_same_as_in_the_run(finished: Path, predictor: Predictor) -> None:
    """Law: the published model scores on dev what the summary says."""
    dev = load_corpus(TrainConfig(**RunFolder(finished).settings())).dev
    found = [each["label"] for each in predictor.predict(dev.texts())]
    right = sum(map(str.__eq__, found, (NAMES[label] for label in dev.labels())))
    summary = json.loads((finished / "summary.json").read_text())
    assert right / len(dev) == pytest.approx(summary["dev"]["accuracy"])


@pytest.mark.numeric
@pytest.mark.parametrize(("rates", "dtype"), [(FAST, "bf16"), (SLOW, "fp32")])
def test_precision_of_the_run(
    copy: Path,
    predictor: Predictor,
    monkeypatch: pytest.MonkeyPatch,
    rates: dict[str, float],
    dtype: str,
) -> None:
    """Law: a run in 16 bits predicts in them where they are fast, else in fp32."""
    monkeypatch.setenv("HALFSTEP_RATES", json.dumps({"cpu": rates}))
    monkeypatch.setattr("halfstep.machine.hardware.gemm_rates", lambda _: rates)
    assert predictor.precision == "fp32 on cpu"
    path = copy / "resolved.toml"
    text = path.read_text().replace('"O0"', '"O2"').replace('"fp32"', '"bf16"', 1)
    path.write_text(text)
    assert "bf16" in text
    low = Predictor(copy, "cpu")
    assert low.precision == f"{dtype} on cpu"
    texts = ["abcabc", "defdef", "x"]
    dtypes = set()
    hook = register_module_forward_hook(
        lambda module, _, out: (
            dtypes.add(out.dtype) if isinstance(module, nn.Linear) else None
        )
    )
    predictions = [*low.predict(texts)]
    hook.remove()
    assert (torch.bfloat16 in dtypes) == (dtype == "bf16")
    for one, other in zip(predictions, predictor.predict(texts), strict=True):
        assert one["p(rain)"] == pytest.approx(other["p(rain)"], abs=0.02)
        assert one == other or dtype == "bf16"


def test_cut(predictor: Predictor) -> None:
    """Law: a text is cut as in training, and reported; one that just fits is not."""
    fits = LONGEST - 2  # beside the tokens of start and end
    rows = text_rows("a" * n for n in (fits, fits + 1, 2, 5000))
    ((_, (one, *others), cut),) = predictor.predict_rows(rows)
    assert cut == [1, 3]
    for each in others[::2]:
        assert each == pytest.approx(one, abs=CLOSE)


def test_entities(tagger: Predictor) -> None:
    """Law: entities are characters of the text as given; none is after the cut."""

    def per(text: str, *places: tuple[int, int]) -> dict[str, Any]:
        entities = [
            {"start": start, "end": end, "label": "PER", "text": text[start:end]}
            for start, end in places
        ]
        return {"entities": entities}

    texts = ["a b c a", "aaa", " BCb", "aaaaab", "aaaaaab"]
    places = [[(2, 5)], [], [(1, 3), (3, 4)], [(5, 6)], []]
    expected = [per(text, *each) for text, each in zip(texts, places, strict=True)]
    assert list(tagger.predict(texts)) == expected


TEXTS = ("abcab", "ccab a", "bb", "acacacac")


def test_classes_of_a_pipeline(tmp_path: Path) -> None:
    """Law: transformers' pipeline gives the labels of a run whose model is plain."""
    run = plain_run(tmp_path / "run", "classify", BertForSequenceClassification, *NAMES)
    classify = pipeline("text-classification", model=str(run / "model"), device="cpu")
    theirs = classify(list(TEXTS), truncation=True)
    ours = list(Predictor(run).predict(TEXTS))
    assert [each["label"] for each in theirs] == [each["label"] for each in ours]
    shares = [each[f"p({each['label']})"] for each in ours]
    assert [each["score"] for each in theirs] == pytest.approx(shares, abs=CLOSE)


def test_entities_of_a_pipeline(tagged: Path) -> None:
    """Law: it gives the entities, too, where the best tags are a valid sequence."""
    words = {"aggregation_strategy": "simple", "device": "cpu"}
    find = pipeline("token-classification", model=str(tagged / "model"), **words)
    for text, ours in zip(TEXTS[:3], Predictor(tagged).predict(TEXTS[:3]), strict=True):
        theirs = {(each["start"], each["end"]) for each in find(text)}
        assert {(each["start"], each["end"]) for each in ours["entities"]} == theirs
    assert theirs


def test_rows_of_a_file(
    predictor: Predictor, tagger: Predictor, tmp_path: Path
) -> None:
    """Law: a file's rows keep all columns as they stand, with or without labels.

    Rows of tagged tokens have their text; a tagger reads tables, too.
    """
    (tmp_path / "a.csv").write_text("id,body,n\n007,abc,1.0\n 8 ,def,NA\n")
    given = {"text_column": None, "encoding": None, "delimiter": None}
    given |= {"skip_bad_rows": False}
    for each in (predictor, tagger):
        rows = list(
            each.read_rows(
                str(tmp_path / "a.csv"), [], **given | {"text_column": "body"}
            )
        )
        assert [row.text for row in rows] == ["abc", "def"]
        assert rows[0].columns == {"id": "007", "body": "abc", "n": "1.0"}
        assert list(rows[1].columns.values()) == [" 8 ", "def", "NA"]
    (tmp_path / "a.bio").write_text("a\tO\nb\tB-PER\n\nc\tO\n")
    tagged = tagger.read_rows(str(tmp_path / "a.bio"), [], **given)
    assert [row.columns for row in tagged] == [{"text": "a b"}, {"text": "c"}]


def test_no_run(copy: Path, tmp_path: Path) -> None:
    """Law: a folder without a run, or none at all, is rejected with what to do.

    A run that has checkpoints but no model is to be resumed.
    """
    for place in (tmp_path, tmp_path / "no thing"):
        assert refused(Predictor, place) == (
            f"{place} holds no run: there is no {place / 'model'}; train with --out "
            f"{shlex.quote(str(place))}."
        )
    inside = copy / "model"
    assert refused(Predictor, inside) == f"{inside} is the model of a run; give {copy}."
    shutil.move(inside, copy / "elsewhere")
    unfinished = copy
    for name in (copy.name, "model"):
        unfinished = unfinished.rename(tmp_path / name)
        assert refused(Predictor, unfinished) == (
            f"{unfinished} is not finished: there is no {unfinished / 'model'}; train "
            f"with --resume --out {unfinished}."
        )


def without_classifier(path: Path) -> None:
    weights = load_file(path)
    del weights["classifier.weight"]
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("config.json", lambda path: path.write_text("{}"), "transformers cannot load"),
        ("model.safetensors", without_classifier, "it lacks weights classifier.weight"),
        ("tokenizer.json", Path.unlink, "backend tokenizer"),  # transformers' words
    ],
)
def test_a_sealed_folder_that_is_no_model(
    copy: Path, name: str, spoil: Callable[[Path], object], reason: str
) -> None:
    """Law: a model that lacks a weight, or its vocabulary, predicts nothing."""
    spoil(copy / "model" / name)
    seal_again(copy / "model")
    message = refused(Predictor, copy)
    assert message.startswith(f"{copy / 'model'} is damaged: ")
    assert reason in message
    assert "Train again" in message


@pytest.mark.parametrize(
    ("bad", "fault"), [(" \n\u3000", "blank"), ("", "blank"), ("ab\udcff", "surrogate")]
)
def test_bad_texts(predictor: Predictor, bad: str, fault: str) -> None:
    """Law: a blank or broken text is rejected by its number."""
    message = refused(lambda: list(predictor.predict(["abc", bad])))
    assert message.startswith("text 2 cannot be used: ")
    assert fault in message


def test_lines() -> None:
    """Law: a text a line, in any encoding, without blank lines; line 3 says so."""
    for encoding in (None, "gb18030"):
        data = "ab c\r\n\n 天 \n  \nlast".encode(encoding or "utf-8-sig")
        rows = list(line_rows(io.BytesIO(data), encoding))
        assert [row.text for row in rows] == ["ab c", " 天 ", "last"]
        assert rows[1].where == "standard input line 3"
    refused(lambda: list(line_rows(io.BytesIO(b"ab\nc\xff\n"))))


def test_what_is_asked_about(tmp_path: Path) -> None:
    """Law: the name of a file as a text is asked about, and texts beside a file."""
    path = tmp_path / "my posts.csv"
    path.touch()
    line = refused(check_texts, Path("run"), [str(path)], None, {})
    for command in (
        f"run --data '{path}';",
        f"echo '{path}' | halfstep predict run - ",
    ):
        assert command in line
    check_texts(Path("run"), ["no\0file", "x" * 9999, str(tmp_path)], None, {})
    for texts, data, flags, named in (
        ([], None, {}, "--data FILE"),
        (["a"], "b.csv", {}, "'a'"),
        (["a"], None, {"encoding": "gb18030"}, "--encoding"),
        (["-"], None, {"skip_bad_rows": True}, "--skip-bad-rows"),
    ):
        assert named in refused(check_texts, Path("run"), texts, data, flags)
    check_texts(Path("run"), ["-"], None, {"encoding": "gb18030"})
