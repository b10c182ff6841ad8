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


EXAMPLE = 'write for example module = "classifier", run = "fp32".'
ONE_PATTERN = (
    "give exactly one of op, module, type, for example "
    'module = "classifier", run = "fp32".'
)
FILES = {
    "base = lean": " cannot be read: Invalid value (at line 1, column 8). Give TOML as "
    "Policy.save writes it.",
    "": ': base = None is not a string; write base = "torch".',
    "base = 3": ': base = 3 is not a string; write base = "torch".',
    "base = 'amp'": ": policy='amp' is not known; the named policies are 'torch' and "
    "'lean'.",
    "base = 'lean'\nrules = []": ": 'rules' is not known; write base and [[rule]].",
    "base = 'lean'\nrule = 'op:mm=low'": ": rule is not a list of tables; start each "
    "with [[rule]].",
    "base = 'lean'\nrule = ['op:mm=low']": ": rule is not a list of tables; start each "
    "with [[rule]].",
}
"""Text of a file -> what is said after its name."""
SECOND_RULES = {
    "op = 'mm'\nrun = 'bf16'": ": rule 'op:mm=bf16': 'bf16' is not a category; choose "
    "one of low, fp32, promote, keep, banned.",
    "module = '/a(/'\nrun = 'fp32'": ": rule 'module:/a(/=fp32': '/a(/' is not a "
    "regular expression: missing ), unterminated subpattern at position 1. Fix it, or "
    "write a glob, without the slashes.",
    "op = 'mm'\ncategory = 'low'": f": 'category' is not known; {EXAMPLE}",
    "op = 'mm'\nmodule = 'a'\nrun = 'low'": f": it has op and module; {ONE_PATTERN}",
    "run = 'low'": f": it has no pattern; {ONE_PATTERN}",
    "op = 'mm'": f": it does not say how to run; {EXAMPLE}",
    "op = 'mm'\nrun = 16": ": run = 16 is not a string; put it in quotes.",
}
"""Text of a file's second rule -> what is said after the file's name and its number."""
RULED = "base = 'lean'\n[[rule]]\nop = 'mm'\nrun = 'low'\n[[rule]]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *FILES.items(),
        *(
            (RULED + text, f", rule 2{message}")
            for text, message in SECOND_RULES.items()
        ),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """Law: what is wrong is named with its file and rule, and what would be right."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Policy.load(path)
    assert str(caught.value) == f"policy file {str(path)!r}{message}"


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


def test_half_a_character(tmp_path: Path) -> None:
    """Law: what no file of TOML can hold is refused, and nothing is written."""
    path = tmp_path / "mine.toml"
    with pytest.raises(UserError) as caught:
        (LEAN + Rule("op", "a\ud800", "low")).save(path)
    assert str(caught.value) == (
        f"policy file {str(path)!r} cannot hold '\\ud800', half of a surrogate pair: "
        "write the pattern or reason without it."
    )
    assert not path.exists()
