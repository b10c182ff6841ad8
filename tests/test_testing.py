"""halfstep.testing: its assertions hold where they should, and fail where not."""

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.testing import assert_dtypes, assert_unchanged, overflow_in_backward

X = torch.ones(4, 8)


def make(level: str, dtype: str = "bf16") -> tuple[nn.Module, hs.Session]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    return model, hs.prepare(model, optimizer, level, dtype=dtype)


def backward(model: nn.Module, session: hs.Session) -> None:
    with session.autocast():
        loss = model(X).square().mean()
    session.backward(loss)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_overflow_where_it_is_wanted(level: str) -> None:
    """Law: the chosen step is skipped, and changes nothing; the others are applied."""
    model, session = make(level)
    applied = []
    with overflow_in_backward(model, at=2):
        for number in range(3):
            backward(model, session)
            if number == 1:
                with assert_unchanged(session):
                    applied.append(session.step().applied)
            else:
                applied.append(session.step().applied)
    assert applied == [True, False, True]
    backward(model, session)
    assert session.step().applied  # the hook is gone


def test_with_a_scaler_of_torch() -> None:
    """Law: it is no matter who scales."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    with overflow_in_backward(model), assert_unchanged(model, optimizer):
        scaler.scale(model(X).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**15


def test_overflows_that_never_come() -> None:
    """Law: a test that does not reach its overflow fails; nonsense is refused."""
    model = nn.Linear(8, 1)
    with (
        pytest.raises(AssertionError, match="in backward pass 2; 1 came"),
        overflow_in_backward(model, at=2),
    ):
        model(X).sum().backward()
    with pytest.raises(hs.UserError, match="at"), overflow_in_backward(model, at=0):
        pass
    frozen = nn.Linear(8, 1).requires_grad_(requires_grad=False)
    refused = pytest.raises(hs.UserError, match="no parameter")
    with refused, overflow_in_backward(frozen):
        pass


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_change_is_named(level: str) -> None:
    """Law: an applied step fails the assertion, with names."""
    model, session = make(level)
    backward(model, session)
    with (
        pytest.raises(AssertionError, match=r"Session has changed: .*more"),
        assert_unchanged(session),
    ):
        session.step()
    nan = nn.Linear(2, 1)
    with torch.no_grad():
        nan.weight.fill_(torch.nan)
    with assert_unchanged(nan):
        pass
    with (
        pytest.raises(AssertionError, match=r"Linear has changed: \['bias'\]"),
        assert_unchanged(nan),
    ):
        nan.bias.data.add_(1)


def call(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = model(X)
    return output


def test_dtypes() -> None:
    """Law: inputs and outputs of each module that a pattern fits are compared."""
    model, _ = make("O1")
    good = {"": ("fp32", "bf16"), "0": ("fp32", "bf16"), "[12]": ("bf16", "bf16")}
    with assert_dtypes(model, good):
        call(model)
    for wrong, message in {
        "2": r"module '2' took bf16 and returned bf16; expected were fp32 and fp32",
        "": "the model took fp32 and returned bf16; expected were fp32 and fp32",
    }.items():
        with (
            pytest.raises(AssertionError, match=message),
            assert_dtypes(model, {wrong: ("fp32", "fp32")}),
        ):
            call(model)
    with (
        pytest.raises(AssertionError, match="module '0' was not called"),
        assert_dtypes(model, {"0": ("fp32", "bf16")}),
    ):
        pass
    for bad in ({"3": ("fp32", "fp32")}, {"0": ("fp31", "fp32")}):
        with pytest.raises(hs.UserError), assert_dtypes(model, bad):
            pass
