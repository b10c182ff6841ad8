"""The laws of a run's report: everything told is on the page, and nothing else."""

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from halfstep.machine import hardware
from halfstep.reporting.table import Table
from halfstep.train.baseline import Baseline
from halfstep.train.metrics import EvalMetrics
from halfstep.train.output.html_report import ReportData, page

PARTS = {"input": 0.001, "forward": 0.01, "backward": 0.02, "update": 0.008}
PARTS |= {"rest": 0.001}


CONFUSION = Table("Confusion", ("true", "a", "b"), (("a", 2, 1), ("b", 0, 1)))


def judged(shift: float) -> EvalMetrics:
    per = (("a", 0.5, 0.625, 0.75, 3), ("b", 0.5, 0.25, 0.375, 1))
    scores = {"accuracy": 0.25 + shift, "macro_f1": 0.5625}
    return EvalMetrics(0.5 + shift, scores, per, CONFUSION)


def step(number: int, **changes: object) -> dict[str, Any]:
    record = {"step": number, "epoch": 0, "loss": 1 / number, "lr": 0.001}
    record |= {"scale": 1024.0, "skipped": False, "skipped_total": 0}
    record |= {"found_inf_in": [], "grad_norm": 1.5, "examples_per_s": 100.0}
    return record | {"seconds": PARTS} | changes


def evaluation(number: int, **scores: object) -> dict[str, Any]:
    record = {"step": number, "event": "eval", "dev_loss": 0.5, "dev_accuracy": 0.75}
    return record | scores


ALL = [*(step(i) for i in range(1, 31)), evaluation(30)]


def told(**changes: Any) -> ReportData:
    """Return what a small run has to tell, without the records that become curves."""
    whole = ReportData(
        title="halfstep run: posts",
        lead="It went well.",
        settings={"lr": 5e-05, "compile": False, "freeze": None},
        chosen=frozenset({"lr"}),
        metrics={"dev": judged(0.125), "test": judged(0.0)},
        worst_examples=Table("Wrong", ("text", "probability"), (("so sad", 0.875),)),
        loss_unit="nats",
        against_fp32=Table("Against fp32", ("level",), (("O2",),)),
        precision=Table("Precision", ("module", "why"), (("Linear", "a rule"),)),
        records=(),
        summary={"train_seconds": 12.25, "peak_memory_bytes": 3 << 20},
        data_findings=("Texts were cut.",),
    )
    return replace(whole, **changes)


def sections(**changes: Any) -> dict[str, ET.Element]:
    """Parse a page as XML, which fails where a tag is not closed; return its parts."""
    document = page(told(**changes)).partition("\n")[2]
    root = ET.fromstring(re.sub("(<meta[^>]*)>", r"\1/>", document))  # noqa: S314
    return {str(s.findtext("h2")): s for s in root.iter("section")}


def grids(section: ET.Element) -> list[list[list[str]]]:
    """Return the tables of a section as words."""
    return [
        [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
        for table in section.iter("table")
    ]


def notes_of(section: ET.Element) -> list[str]:
    return [str(p.text) for p in section.iter("p")]


def captions(section: ET.Element) -> list[str]:
    return [str(caption.text) for caption in section.iter("figcaption")]


def test_headline() -> None:
    """Law: score, cost against fp32 or else speed, level; the unknown is left out."""
    baseline: Baseline | None = None

    def tiles(**summary: object) -> list[list[str]]:
        report = told(summary=summary, baseline=baseline)
        html = page(report).partition("<section>")[0]
        return [re.findall(r"<(?:b|span)>([^<]*)<", div) for div in html.split("<div>")]

    assert tiles() == [[]]
    level = {"level": "O2", "dtype": "bf16", "applied": 8, "skipped": 1}
    assert tiles(**level, best_by="macro_f1", examples_per_s=99.6)[1:] == [
        ["macro F1 on test", "0.5625", "loss 0.5000"],
        ["speed", "100 texts/s", ""],
        ["level", "O2 bf16", "8 steps, 1 skipped"],
    ]
    two = {"fp32": 4 << 20, "level": 3 << 20}
    facts = {"ms": {"fp32": 10.0, "level": 5.0}, "bytes": two}
    facts |= {"time_ratio": 0.51}
    assert tiles(fp32=facts, examples_per_s=99.6)[1:] == [
        ["time of a step", "0.51 x fp32", "5.0 ms against 10.0 ms"],
        ["state and activations", "0.75 x fp32", "3 MiB against 4 MiB"],
    ]
    assert tiles(fp32={"note": "too short"}) == [[]]
    baseline = Baseline("simple", {"macro_f1": 0.5})
    assert tiles(best_by="macro_f1")[1][2] == "baseline 0.5000"


def test_order_of_the_sections() -> None:
    """Law: what is to be known first, how good it is, how it went, what it was.

    What there is nothing of has no section.
    """
    first = ["Findings", "Quality", "Confusion", "Worst mistakes", "Curves"]
    last = ["Where the time of a step went", "Cost", "Skipped steps", "Precision"]
    found = list(sections(records=[*ALL, step(31, skipped=True)]))
    assert found == [*first, *last, "Configuration", "Machine"]
    empty = Table("Wrong", ("text",), (), ("0 of 4 predictions are wrong.",))
    some = sections(data_findings=(), worst_examples=empty)
    assert not {"Findings", "Worst mistakes"} & set(some)


def test_without_a_test_split() -> None:
    """Law: the last split is the one that counts, dev where there is no other."""
    found = sections(metrics={"dev": judged(0.0)})
    assert captions(found["Quality"]) == ["Scores", "By label, on dev"]
    assert captions(found["Confusion"]) == ["On dev"]


def test_quality() -> None:
    """Law: scores of all splits side by side, then labels of the last."""
    found = sections()["Quality"]
    scores, labels = grids(found)
    assert captions(found) == ["Scores", "By label, on test"]
    assert scores == [
        ["score", "dev", "test"],
        ["accuracy", "0.3750", "0.2500"],
        ["macro F1", "0.5625", "0.5625"],
        ["weighted F1", "0.6562", "0.6562"],
        ["loss", "0.6250", "0.5000"],
    ]
    assert labels[1] == ["a", "0.500", "0.625", "0.750", "3"]
    assert [row[0] for row in labels[-2:]] == ["macro average", "weighted average"]


def test_confusion_is_a_heat_map() -> None:
    """Law: counts with the truth in rows and guesses across."""
    (grid,) = grids(sections()["Confusion"])
    assert grid == [["true", "predicted"], ["a", "b"], ["a", "2", "1"], ["b", "0", "1"]]


def test_curves() -> None:
    """Law: all that was logged over steps is drawn, but no scale that is constant.

    What was never logged, or finite once, has no axes; where losses are drawn it is
    said what each holds.
    """
    scores = {"dev_f1": 0.5, "dev_mcc": 0.25}
    records = [step(1), step(2), evaluation(2, **scores)]
    shown = captions(sections(records=records)["Curves"])
    assert not {"Loss scale", "Scores on dev"} & {*shown}
    records += [step(3, scale=512.0), evaluation(3, **scores)]
    found = sections(records=records)["Curves"]
    expected = ["Loss", "Scores on dev", "Learning rate", "Loss scale"]
    assert captions(found) == [*expected, "Gradient norm before clipping", "Speed"]
    texts = {
        "".join(text.itertext()) for text in found.iter() if text.tag[-4:] == "text"
    }
    assert {"training", "dev", "accuracy", "F1", "MCC"} <= texts
    (note,) = notes_of(found)
    assert note.startswith("The training loss includes")
    some = [step(1, grad_norm=None), {"step": 2, "loss": 0.5}]
    names = captions(sections(records=some)["Curves"])
    assert not {"Gradient norm before clipping", "Scores on dev"} & {*names}
    assert "Loss" in names
    rates = [{"step": number, "lr": 1.0} for number in (1, 2)]
    assert notes_of(sections(records=rates)["Curves"]) == []


def test_where_the_time_went() -> None:
    """Law: medians, 95th percentiles and shares; the first steps are left out."""
    slow, last = PARTS | {"input": 99.0}, PARTS | {"input": 0.041}
    seconds = [*[slow] * 10, *[PARTS] * 19, last]
    records = [{"step": n, "seconds": each} for n, each in enumerate(seconds, 1)]
    found = sections(records=records)["Where the time of a step went"]
    (grid,) = grids(found)
    # 20 steps of 40 ms, one of them 40 ms longer: 840 ms, of which 60 for input.
    # The 95th percentile of 19 ones and a 41 is a twentieth of the way: 1 + 40 / 20.
    assert grid == [
        ["part", "median, ms", "95th percentile, ms", "share, %"],
        ["input", "1.0", "3.0", "7.1"],
        ["forward", "10.0", "10.0", "23.8"],
        ["backward", "20.0", "20.0", "47.6"],
        ["update", "8.0", "8.0", "19.0"],
        ["rest", "1.0", "1.0", "2.4"],
        ["whole step", "40.0", "42.0", "100.0"],
    ]
    (note,) = notes_of(found)
    assert note.startswith("Over 20 steps; the first 10 are left out.")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_times_and_memory_on_a_gpu(device: str) -> None:
    """Law: on a GPU times are the host's, memory is what torch allocated there."""
    records = [{"step": 1, "seconds": PARTS}]
    found = sections(settings={"device": device}, records=records)
    notes = notes_of(found["Where the time of a step went"])
    hosts = [note for note in notes if note.startswith("Times are taken on the host")]
    assert len(hosts) == (device == "cuda")
    _, _, held = grids(found["Cost"])
    peaks = {"cpu": "peak of the process", "cuda": "peak allocated by torch on the GPU"}
    assert held[1:] == [[peaks[device], "3.0"]]


def test_cost_and_memory() -> None:
    """Law: what the summary holds is shown in its unit; what it lacks is not."""
    memory = {"weights": 1 << 20, "moments": 1 << 19}
    summary = {"train_seconds": 1.25, "peak_memory_bytes": 3 << 20, "memory": memory}
    fp32, time, held = grids(sections(summary=summary)["Cost"])
    assert time[1:] == [["time in training steps, s", "1.25"]]
    peak = ["peak of the process", "3.0"]
    assert held[1:] == [peak, ["weights", "1.0"], ["optimizer's moments", "0.5"]]
    assert fp32 == [["level"], ["O2"]]
    memory = {"memory": {"peak": 1 << 20}}
    (held,) = grids(sections(summary=memory, against_fp32=None)["Cost"])
    assert held[1:] == [["peak of the process", "1.0"]]


def test_skipped_steps() -> None:
    """Law: step, scale and parameter of the first twenty, then a count."""
    told = {"scale": 1024.0, "found_inf_in": ["head.weight", "b"]}
    records = [{"step": i, "skipped": i % 2 == 0, **told} for i in range(1, 2051)]
    found = sections(records=records)["Skipped steps"]
    (grid,) = grids(found)
    assert (grid[1], grid[-1][0]) == (["2", "1024", "head.weight, b"], "40")
    assert len(grid) == 21
    assert notes_of(found) == ["Skipped besides these: 1,005."]


def test_configuration() -> None:
    """Law: every setting as people write it, which the run chose, and the machine."""
    found = sections()
    assert grids(found["Configuration"])[0] == [
        ["setting", "value", "chosen by"],
        ["lr", "5e-05", "the run"],
        ["compile", "no", ""],
        ["freeze", "none", ""],
    ]
    rows = hardware.machine_table().rows
    assert grids(found["Machine"])[0][1:] == [
        [what, str(value)] for what, value in rows
    ]
