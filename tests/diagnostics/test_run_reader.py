"""The doctor on folders: facts from files alone, damage named, and the command."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sick_run import environment, profile, sick, step, tally, write

from halfstep import cli
from halfstep.diagnostics.doctor import examination, run_reader, text
from halfstep.diagnostics.doctor.rule import Examination
from halfstep.diagnostics.doctor.run_record import Config, RunFacts, Step
from halfstep.errors import UserError
from halfstep.reporting.finding import Finding

HOSTILE = "\x1b[31m\n\ud800"
SOUND = {
    "profile": profile(),
    "environment": environment(),
    "summary": {"level": "O2", "dtype": "bf16", "padded_share": 0.1},
}


def sound(folder: Path) -> Path:
    tensors = {"fc:output": tally(0, dtype="bfloat16"), "fc:grad": tally(-9)}
    records = [step(n, scale=1.0) for n in range(1, 59)]
    records.append({"step": 10, "event": "stats", "tensors": tensors})
    return write(folder, records, **SOUND)


def test_all_of_a_folder_is_read(tmp_path: Path) -> None:
    """Law: each file's facts arrive, gradients with the scale of their step."""
    facts = run_reader.read(sick(tmp_path / "run"))
    assert facts.name == str(tmp_path / "run")
    assert facts.config == Config("O1", "fp16", None, "dynamic", "cuda")
    assert len(facts.steps) == 400
    assert facts.steps[18] == Step.from_data(
        step(19, scale=131072.0, skipped=True, lr=1e-3 / 19)
        | {"found_inf_in": ["encoder.layer.3.output.weight"]}
    )
    name = "bert.encoder.layer.0.attention.self.query"
    gradients, outputs = facts.stats[f"{name}:grad"], facts.stats[f"{name}:output"]
    assert [each.step for each in gradients] == list(range(1, 401, 20))
    assert {each.scale for each in outputs} == {1.0}
    assert [each.scale for each in gradients[:2]] == [65536.0, 65536.0]
    assert gradients[0].summary.dtype == "fp16"
    assert facts.non_finite[0].step == 114
    assert facts.bad_ops[0].op == "linear"
    assert facts.profile is not None
    assert facts.profile.rows[0].shapes == ((500, 770), (770, 770))
    assert facts.machine is not None
    assert facts.machine.rates["bf16"] == 8.0
    assert facts.weights == {"layer.0.weight": "fp32", "head.weight": "fp32"}


def test_a_sound_run_is_sound(tmp_path: Path) -> None:
    """Law: nothing wrong, nothing found; what was not there is said."""
    facts = run_reader.read(sound(tmp_path / "run"))
    found = examination(facts)
    assert found.findings == ()
    assert not found.not_evaluated
    assert "nothing found by the" in text.text(facts, found)
    facts = replace(facts, profile=None)
    told = text.text(facts, examination(facts))
    assert "Not checked:" in told


def test_an_event_may_name_its_scale(tmp_path: Path) -> None:
    """Law: the event's own scale goes before that of the step; else it is 1."""
    for more, scale in (({"scale": 8.0}, 8.0), ({}, 1024.0)):
        tensors = {"a:grad": tally(0), "a:output": tally(0)}
        event = {"step": 1, "event": "stats", "tensors": tensors} | more
        facts = run_reader.read(write(tmp_path, [event, step(1)]))
        assert facts.stats["a:grad"][0].scale == scale
        assert facts.stats["a:output"][0].scale == 1.0
    bare = run_reader.read(write(tmp_path, [{**event, "step": 7}, step(1)]))
    assert bare.stats["a:grad"][0].scale == 1.0


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    """Law: of many events some are kept, evenly, the first among them."""
    tensors = {"a:grad": tally(0, 1)}
    events = [{"step": n, "event": "stats", "tensors": tensors} for n in range(1, 701)]
    kept = run_reader.read(write(tmp_path, events)).stats["a:grad"]
    assert [each.step for each in kept] == list(range(1, 701, 4))


DAMAGED = [
    ("profile.json", "{", "profile.json is damaged"),
    ("profile.json", '{"wall_s": "long", "rows": []}', "'long'"),
    ("environment.json", '{"machine": {"rates": {"fp32": 1}}}', "'chip'"),
    ("summary.json", "null", "summary.json is damaged"),
    ("resolved.toml", "level = ", "resolved.toml is damaged"),
    ("metrics.jsonl", '{"step": 1}\njunk\n{"step": 2}', "metrics.jsonl line 2 is"),
    ("metrics.jsonl", '{"step": "x"}\n', "metrics.jsonl line 1 is damaged"),
    ("metrics.jsonl", '{"step": 1, "event": "stats", "tensors": 7}', "line 1 is"),
    ("metrics.jsonl", '{"step": 1e999}\n', "line 1 is damaged: OverflowError"),
    ("metrics.jsonl", f'{{"step": 1, "loss": {10**400}}}\n', "line 1 is damaged"),
    ("metrics.jsonl", "[" * 100_000 + "\n", "line 1 is damaged: RecursionError"),
    ("resolved.toml", "accumulate = inf", "resolved.toml is damaged"),
]


@pytest.mark.parametrize(("name", "content", "said"), DAMAGED)
def test_a_damaged_file_is_named(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    """Law: one error names the file, its line, and the trouble."""
    folder = sound(tmp_path / "run")
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        run_reader.read(folder)
    assert str(caught.value).count("is damaged") == 1


def test_a_line_that_is_being_written(tmp_path: Path) -> None:
    """Law: a run can be read while it goes on: the torn last line is left out."""
    folder = write(tmp_path, [step(1), step(2)])
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-9])
    assert [each.step for each in run_reader.read(folder).steps] == [1]


def tried(*numbers: int) -> list[dict[str, Any]]:
    return [step(n, scale=2.0 ** (16 - n)) for n in numbers]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (tried(*range(1, 10)), tried(*range(1, 30))),  # another run
        (tried(*range(1, 10)), tried(*range(5, 30))),  # gone on with from step 4
        ([], [step(n // 2 + 1) for n in range(40)]),  # two at once
    ],
)
def test_steps_that_come_again(
    tmp_path: Path, before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> None:
    """Law: of a step that was made twice the later record counts.

    So do events, which may stand before the record of their step.
    """
    old = {"step": 6, "event": "non_finite", "where": ["old:output"]}
    new = {"step": after[0]["step"], "event": "non_finite", "where": ["new:output"]}
    facts = run_reader.read(write(tmp_path, [*before, old, *before[-1:], new, *after]))
    numbers = [each.step for each in facts.steps]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == after[-1]["step"]
    names = [each.where[0] for each in facts.non_finite]
    assert names == (["new:output"] if before else ["old:output", "new:output"])


def test_no_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a folder that may not be looked into is refused in one line."""
    folder = sound(tmp_path / "run")

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(folder), "exists", refuse)
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", str(folder)])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said == f"halfstep: error: {folder} cannot be read: Permission denied.\n"


def test_settings_as_given_will_do(tmp_path: Path) -> None:
    """Law: without resolved.toml config.json counts; "auto" is not known."""
    folder = sound(tmp_path / "run")
    (folder / "resolved.toml").unlink()
    (folder / "config.json").write_text('{"dtype": "fp16", "loss_scale": "auto"}')
    (folder / "summary.json").unlink()
    assert run_reader.read(folder).config == Config(dtype="fp16")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: status 0, 80 columns, worst first; data and text say the same."""
    folder, out = sick(tmp_path / "run"), tmp_path / "d.json"
    assert cli.run(["doctor", str(folder), "--json", str(out)]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    found = examination(run_reader.read(folder))
    data = json.loads(out.read_text(encoding="utf-8"))
    assert tuple(Finding(**each) for each in data["findings"]) == found.findings
    assert data["looked_at"] == found.num_evaluated
    missing = {each["why"]: each["rules"] for each in data["not_looked_at"]}
    assert missing == found.not_evaluated
    heads = [line for line in told.splitlines() if line.partition(" ")[0].isupper()]
    assert [head.split("  ")[1] for head in heads] == [f.rule for f in found.findings]
    assert [head.split()[0].lower() for head in heads] == [
        each.severity for each in found.findings
    ]
    rules = {each.rule for each in found.findings if each.severity == "error"}
    assert rules == {"bad op", "not finite forward", "underflow"}


def test_hostile_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: escape codes and broken text in names do no harm."""
    folder, out = sick(tmp_path / "run", HOSTILE), tmp_path / "d.json"
    assert cli.run(["doctor", str(folder), "--json", str(out)]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert json.loads(out.read_text(encoding="utf-8"))["findings"]


def test_lines_fit_and_hang() -> None:
    """Law: long words are broken, and further lines stand below the first."""
    long = Finding("note", "r", "a" * 200, "b " * 100, "", "s", "c.")
    given = Examination((long,), {"why": ["x"] * 60}, 1)
    told = text.text(RunFacts(name="n" * 100), given).splitlines()
    assert max(map(len, told)) == 80
    where = told.index(next(line for line in told if line.startswith("  where")))
    assert told[where + 1].startswith(" " * 12 + "a")


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
    ),
    max_leaves=6,
)
KEYS = ("step", "event", "tensors", "seconds", "where", "groups", "found_inf_in")
EVENTS = st.sampled_from(["stats", "non_finite", "bad_op", "lost_updates", None])


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(KEYS), values)
        | st.fixed_dictionaries({"step": st.integers(0, 9), "event": EVENTS}),
        max_size=4,
    ),
    values,
    values,
)
def test_any_json_is_survived(
    tmp_path: Path, records: list[Any], profile_: Any, environment_: Any
) -> None:
    """Law: whatever JSON stands in the files, there is an answer or a `UserError`."""
    folder = write(tmp_path, records, profile=profile_, environment=environment_)
    try:
        facts = run_reader.read(folder)
    except UserError as error:
        assert str(folder) in str(error)  # noqa: PT017
    else:
        assert text.text(facts, examination(facts))


def test_what_the_command_rejects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a folder without a run, an unwritable file: one line, status 2."""
    folder, missing = sound(tmp_path / "run"), tmp_path / "no" / "x"
    (tmp_path / "empty").mkdir()
    holds = "holds no run: neither metrics.jsonl nor any other file of one;"
    written = f"{missing} cannot be written: No such file or directory."
    for words, said in (
        ([tmp_path / "none"], f"none {holds}"),
        ([tmp_path / "empty"], holds),
        ([folder, "--json", missing], f"--json {written}"),
    ):
        assert cli.run(["doctor", *map(str, words)]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
