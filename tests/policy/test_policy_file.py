"""Policies as files: written, read back, and refused with the place."""

import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from halfstep.errors import UserError
from halfstep.policy import CATEGORIES, LEAN, Policy, Rule

TRICKY = (
    '"quoted" \\back\\slash\\ \t\n\r\b\f\x00\x1b\x7f\x85\u2028 \u00e9 \u4e2d \U0001f600'
)
TEXTS = st.text() | st.text(TRICKY)
POLICIES = st.builds(
    Policy,
    st.lists(
        st.builds(
            Rule,
            st.sampled_from(["op", "module", "type"]),
            # Slashes around it would make it an expression, and most texts are none.
            TEXTS.filter(lambda text: text and " + " not in text).map(
                lambda text: f"{text}." if text[0] == text[-1] == "/" else text
            ),
            st.sampled_from(CATEGORIES),
            TEXTS,
        ),
        max_size=4,
    ).map(tuple),
    st.sampled_from(["torch", "lean"]),
)


def everything(policy: Policy) -> tuple[object, ...]:
    """Return all that a policy holds, reasons too, which equality leaves out."""
    rules = [(r.kind, r.pattern, r.category, r.reason) for r in policy.rules]
    return policy.base, rules


@given(policy=POLICIES)
@example(policy=LEAN)
@example(policy=LEAN + Rule("module", TRICKY, "keep", TRICKY))
def test_load_undoes_save(policy: Policy) -> None:
    """Law: every field comes back, whatever the texts hold."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "policy.toml")
        policy.save(path)
        assert everything(Policy.load(path)) == everything(policy)
        assert everything(Policy.load(str(path))) == everything(policy)
        # TOML's own reader sees what was meant.
        content = tomllib.loads(path.read_bytes().decode())
        assert content["base"] == policy.base
        for rule, table in zip(policy.rules, content.get("rule", []), strict=True):
            expected = {"run": rule.category, "reason": rule.reason}
            assert table == {rule.kind: rule.pattern} | expected


def test_a_file_by_hand(tmp_path: Path) -> None:
    """Law: what people write is read, and what is written looks like it."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "lean"\n'
        "# a comment\n"
        "[[rule]]\n"
        "module = '/encoder\\.[0-3]\\..*/'\n"
        'run = "fp32"\n'
        "[[rule]]\n"
        'op = "softmax"\n'
        'run = "low"\n'
        'reason = "measured"\n'
    )
    read = Policy.load(path)
    assert everything(read) == (
        "lean",
        [
            ("module", r"/encoder\.[0-3]\..*/", "fp32", "your rule"),
            ("op", "softmax", "low", "measured"),
        ],
    )
    assert everything(Policy.parse(str(path))) == everything(read)
    read.save(path)
    assert path.read_text() == (
        'base = "lean"\n'
        "\n"
        "[[rule]]\n"
        'module = "/encoder\\\\.[0-3]\\\\..*/"\n'
        'run = "fp32"\n'
        'reason = "your rule"\n'
        "\n"
        "[[rule]]\n"
        'op = "softmax"\n'
        'run = "low"\n'
        'reason = "measured"\n'
    )


FILES = {
    "base = lean": " cannot be read: Invalid value (at line 1, column 8).",
    "": ': it must have base = "torch" or "lean"',
    "base = 3": ': it must have base = "torch" or "lean"',
    "base = 'amp'": ": policy='amp' is not known",
    "base = 'lean'\nrules = []": ": it must have base",
    "base = 'lean'\nrule = 'op:mm=low'": ": it must have base",
    "base = 'lean'\nrule = ['op:mm=low']": ", rule 1: 'op:mm=low' is no rule",
}
"""Text of a file -> what is said after its name."""
SECOND_RULES = {
    "op = 'mm'\nrun = 'bf16'": "rule 'op:mm=bf16': 'bf16' is not a category",
    "module = '/a(/'\nrun = 'fp32'": "rule 'module:/a(/=fp32': '/a(/' is not a regul",
    "op = 'mm'\ncategory = 'low'": "{'op': 'mm', 'category': 'low'} is no rule",
    "op = 'mm'\nmodule = 'a'\nrun = 'low'": "{'op': 'mm', 'module': 'a', 'run': 'low'}",
    "run = 'low'": "{'run': 'low'} is no rule; write tables [[rule]] with one of op, m",
    "op = 'mm'": "{'op': 'mm'} is no rule",
    "op = 'mm'\nrun = 16": "{'op': 'mm', 'run': 16} is no rule",
}
"""Text of a file's second rule -> what is said after the file's name and its number."""
RULED = "base = 'lean'\n[[rule]]\nop = 'mm'\nrun = 'low'\n[[rule]]\n"
CASES = FILES | {
    RULED + text: f", rule 2: {message}" for text, message in SECOND_RULES.items()
}


@pytest.mark.parametrize("text", CASES)
def test_files_that_are_rejected(tmp_path: Path, text: str) -> None:
    """Law: what is wrong is named with its file and rule."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Policy.load(path)
    assert str(caught.value).startswith(f"policy file {str(path)!r}{CASES[text]}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Law: no file, or no text, is an answer of one line too."""
    path = tmp_path / "mine.toml"
    with pytest.raises(UserError) as absent:
        Policy.parse(str(path))
    assert str(absent.value) == (
        f"policy file {str(path)!r} cannot be read: No such file or directory. "
        "Give TOML as Policy.save writes it."
    )
    path.write_bytes(b"base = '\xff'")
    with pytest.raises(UserError, match="can't decode byte 0xff in position 8"):
        Policy.load(path)
