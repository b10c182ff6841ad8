"""Operations that refuse a mix of dtypes: what is said of them, and what mends it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs
from halfstep.casting.dtype_mismatch import DtypeMismatch, explain
from halfstep.policy import Policy, Rule, decide
from halfstep.policy.rules import check_ops

Run = Callable[[Tensor, Tensor], object]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INDEX = torch.tensor([1, 0])
MASK = torch.tensor([True, False])
LOW = pytest.mark.parametrize("low", [BF16, FP16])


class Case(NamedTuple):
    """A call that torch refuses, of two 2 x 2 tensors of different dtypes."""

    operation: str
    run: Run


def refusal(run: Callable[..., object], *args: object) -> RuntimeError:
    """Return torch's error; skip where this version of torch takes the mix."""
    try:
        run(*args)
    except RuntimeError as error:
        return error
    pytest.skip(f"torch {torch.__version__} takes this mix of dtypes")


def found_in(error: BaseException) -> DtypeMismatch:
    found = explain(error)
    assert found is not None, error
    return found


def line_of(found: DtypeMismatch) -> str:
    return str(found).splitlines()[-1]


# Operations that torch's table for the CPU leaves alone: a rule mends them

PRODUCTS = [
    Case("mv", lambda a, b: torch.mv(a, b[0])),
    Case("addmv", lambda a, b: torch.addmv(a[0], a, b[0])),
    Case("addmv", lambda a, b: b[0].addmv(a, b[1])),
    Case("linalg_multi_dot", lambda a, b: torch.linalg.multi_dot([a, a, b])),
]
OTHERS = [
    Case("dot", lambda a, b: torch.dot(a[0], b[0])),
    Case("tensordot", torch.tensordot),
    Case("cross", lambda a, b: torch.cross(a.expand(3, 2, 2), b.expand(3, 2, 2))),
    Case("bilinear", lambda a, b: functional.bilinear(a, a, b.expand(3, 2, 2))),
    Case("lerp", lambda a, b: a.lerp(b, 0.5)),
    Case("index_put", lambda a, b: a.index_put((INDEX,), b)),
    Case("index_add", lambda a, b: a.index_add(0, INDEX, b)),
    Case("put", lambda a, b: torch.put(a, INDEX, b[0])),
    Case("scatter", lambda a, b: a.scatter(0, INDEX.expand(2, 2), b)),
    Case("masked_scatter", lambda a, b: a.masked_scatter(MASK, b)),
    Case("layer_norm", lambda a, b: functional.layer_norm(a, (2,), b[0], b[1])),
    Case("batch_norm", lambda a, b: functional.batch_norm(a, b[0], b[1])),
    Case("isclose", torch.isclose),
    Case("_weight_norm", torch._weight_norm),
    Case("inner", torch.inner),
    Case(
        "embedding_bag",
        lambda a, b: functional.embedding_bag(
            INDEX[None], a, mode="sum", per_sample_weights=b[:1]
        ),
    ),
]
MENDED = [
    *((case, "low") for case in PRODUCTS),
    *((case, "promote") for case in OTHERS),
]


@LOW
@pytest.mark.parametrize(("case", "category"), MENDED)
def test_operation_without_row(case: Case, category: str, low: torch.dtype) -> None:
    """Law: it is named with its dtypes, and the rule casts what the call takes then."""
    with torch.autocast("cpu", low):
        error = refusal(case.run, torch.rand(2, 2), torch.rand(2, 2).to(low))
    found = found_in(error)
    assert found.operation == case.operation
    assert set(found.dtypes) == {FP32, low}
    assert found.rule == f"op:{case.operation}={category}"
    assert str(found).startswith(f"{error}\n-> {case.operation} got ")
    told = f"Fix it with the policy rule '{found.rule}', or cast by hand."
    assert line_of(found).endswith(told)
    policy = Policy((Rule.parse(found.rule),))
    check_ops(policy)
    dtype = decide(case.operation, found.dtypes, "cpu", policy=policy, low=low).dtype
    case.run(torch.rand(2, 2).to(dtype), torch.rand(2, 2).to(dtype))


def test_operands_are_named() -> None:
    """Law: dtypes come with the names that the source has for their operands.

    What only running an expression would tell is taken from torch's words.
    """
    fp32, bf16 = torch.rand(2, 2), torch.rand(2, 2, dtype=BF16)
    error = refusal(lambda: torch.addmv(bf16[0], fp32.T, fp32.view(4)[:2]))
    assert line_of(found_in(error)) == (
        "-> addmv got bfloat16 (bf16), float32 (fp32). Fix it with the policy rule "
        "'op:addmv=low', or cast by hand."
    )
    fp16 = torch.rand(2, 2, dtype=FP16)
    found = found_in(refusal(lambda: torch.addmv(fp16[0].float(), bf16, bf16[0])))
    assert (found.operation, found.dtypes) == ("addmv", (FP32, BF16))
    assert "-> addmv got float32, bfloat16 (bf16). " in line_of(found)
    with torch.autocast("cpu", BF16):
        error = refusal(lambda: torch.addmm(fp32, bf16, fp32.double()))
    assert set(found_in(error).dtypes) == {BF16, FP64}
    found = found_in(refusal(lambda: torch.inner(fp16.float(), fp16.bfloat16())))
    assert (found.operation, found.dtypes, found.rule) == ("inner", (), "")
    assert line_of(found) == (
        "-> inner got operands of different dtypes. Cast them to one dtype by hand."
    )


def test_cells() -> None:
    """Law: a recurrent cell is a product; its weights and states are found."""
    cell, rows = nn.LSTMCell(2, 2), torch.rand(1, 2, dtype=BF16)
    found = found_in(refusal(cell, rows))
    assert line_of(found) == (
        "-> lstm_cell in the model (LSTMCell) got bfloat16 (input, hx), float32 "
        "(weight_ih, weight_hh, bias_ih, bias_hh). Fix it with the policy rule "
        "'op:lstm_cell=low', or cast by hand."
    )
    assert found.module == ""
    state = torch.zeros(1, 2)
    found = found_in(refusal(cell.bfloat16(), rows, (state, state)))
    assert " got bfloat16 (input, weight_ih, weight_hh, ...), float32 (hx). " in (
        line_of(found)
    )


# Operations that torch's table casts

CAST = [
    Case("linear", functional.linear),
    Case("linear", lambda a, b: functional.linear(a, a, bias=b[0])),
    Case("mm", torch.mm),
    Case("matmul", lambda a, b: a @ b),
    Case("matmul", lambda a, b: a.matmul(b[0])),
    Case("baddbmm", lambda a, b: torch.baddbmm(b[None], a[None], a[None])),
    Case("addmm", lambda a, b: torch.addmm(a, b, b)),
    Case("conv1d", lambda a, b: functional.conv1d(a, b[:, :, None])),
    Case(
        "conv_transpose2d",
        lambda a, b: functional.conv_transpose2d(
            a[:, :, None, None], b[:, :, None, None]
        ),
    ),
    Case("prelu", lambda a, b: functional.prelu(a, b[0])),
    Case("scaled_dot_product_attention", lambda a, b: attend(a, b, b)),
    Case("scaled_dot_product_attention", lambda a, b: attend(a, a, a, mask=b)),
    Case("cdist", torch.cdist),
    Case(
        "grid_sampler",
        lambda a, b: functional.grid_sample(b[None, None], a[None, None]),
    ),
]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@LOW
@pytest.mark.filterwarnings("ignore:Default grid_sample:UserWarning")
@pytest.mark.parametrize("case", CAST)
def test_operation_that_is_cast(case: Case, low: torch.dtype) -> None:
    """Law: what torch's tables cast was refused where autocast was off: no rule."""
    operands = torch.rand(2, 2), torch.rand(2, 2).to(low)
    found = found_in(refusal(case.run, *operands))
    with torch.autocast("cpu", low):
        case.run(*operands)
    assert (found.operation, set(found.dtypes)) == (case.operation, {FP32, low})
    assert found.rule == ""
    assert line_of(found).endswith(
        f" Autocast was off, or a rule keeps {case.operation} as called: cast by hand."
    )


def test_stale_cast() -> None:
    """Law: two low formats need not be what the operands were: no word of autocast.

    torch's cache serves the bf16 weight to the inner region.
    """
    layer, rows = nn.Linear(2, 2), torch.rand(1, 2)
    with torch.autocast("cpu", BF16):
        layer(rows)
        with torch.autocast("cpu", FP16):
            error = refusal(layer, rows)
    found = found_in(error)
    assert set(found.dtypes) == {BF16, FP16}
    assert found.rule == "op:linear=low"


PROMOTED = [
    Case("cat", lambda a, b: torch.cat([a, b])),
    Case("stack", lambda a, b: torch.stack((a, b))),
    Case("index_copy", lambda a, b: a.index_copy(0, INDEX, b)),
]


@pytest.mark.parametrize("case", PROMOTED)
def test_promotion_that_torch_gives_up(case: Case) -> None:
    """Law: torch promotes no mix of 16-bit formats; under the rule, ours does."""
    bf16, fp16 = torch.rand(2, 2).to(BF16), torch.rand(2, 2).to(FP16)
    for operands, dtypes in (((bf16, fp16), (BF16, FP16)), ((fp16, fp16), (FP16,))):
        with torch.autocast("cpu", BF16):
            found = found_in(refusal(case.run, *operands))
        assert (found.operation, found.dtypes) == (case.operation, dtypes)
        assert found.rule == f"op:{case.operation}=promote"
        policy = Policy((Rule.parse(found.rule),))
        decided = decide(case.operation, dtypes, "cpu", policy=policy, low=BF16)
        assert decided.dtype == FP32
    assert line_of(found) == (
        f"-> {case.operation} got float16 (a, b). Fix it with the policy rule "
        f"'{found.rule}', or cast by hand."
    )


# What no rule mends


@pytest.mark.filterwarnings("ignore:Default grid_sample:UserWarning")
@pytest.mark.parametrize("case", [*PRODUCTS, *OTHERS, *CAST])
def test_float64(case: Case) -> None:
    """Law: autocast leaves float64 alone, so its operand is to be cast by hand."""
    a, b = torch.rand(2, 2), torch.rand(2, 2, dtype=FP64)
    for is_on in (True, False):
        with torch.autocast("cpu", BF16, enabled=is_on):
            found = found_in(refusal(case.run, a, b))
        assert (found.operation, found.rule) == (case.operation, "")
        assert set(found.dtypes) == {FP32, FP64}
        assert "No rule touches float64: cast " in line_of(found)
        assert line_of(found).endswith(" to float32 by hand.")


def test_complex_and_integers() -> None:
    """Law: the others follow a complex operand; an integer one becomes float32."""
    real, imaginary = torch.rand(2, 2), torch.rand(2, 2, dtype=torch.complex64)
    found = found_in(refusal(torch.mm, real, imaginary))
    assert (found.dtypes, found.rule) == ((FP32, torch.complex64), "")
    assert line_of(found).endswith(
        "No rule touches complex64: cast the others to it by hand."
    )
    found = found_in(refusal(lambda: torch.inner(real, imaginary)))
    assert (found.dtypes, found.rule) == ((FP32, torch.complex64), "")
    ids = torch.ones(2, 2, dtype=torch.int64)
    found = found_in(refusal(lambda: torch.mm(ids, real)))
    assert (found.dtypes, found.rule) == ((torch.int64, FP32), "")
    assert line_of(found).endswith(
        "No rule touches int64: cast ids to float32 by hand."
    )


def assign(a: Tensor, b: Tensor) -> None:
    a[INDEX] = b


WRITES = [
    Case("index_put_", assign),
    Case("index_add_", lambda a, b: a.index_add_(0, INDEX, b)),
    Case("scatter_", lambda a, b: a.scatter_(0, INDEX.expand(2, 2), b)),
    Case("masked_scatter_", lambda a, b: a.masked_scatter_(MASK, b)),
    Case("lerp_", lambda a, b: a.lerp_(b, 0.5)),
    Case("addmm_", lambda a, b: a.addmm_(b, b)),
    Case("mm", lambda a, b: torch.mm(a, a, out=b)),
]


@pytest.mark.parametrize("case", WRITES)
def test_writing(case: Case) -> None:
    """Law: rules do not reach what writes; the format of what is written to decides."""
    a, b = torch.rand(2, 2), torch.rand(2, 2).to(BF16)
    for is_on in (True, False):
        with torch.autocast("cpu", BF16, enabled=is_on):
            found = found_in(refusal(case.run, a, b))
        assert (found.operation, found.dtypes) == (case.operation, (FP32, BF16))
        assert found.rule == ""
        assert line_of(found).endswith(
            "No rule reaches in-place and out= forms: give all operands float32 by "
            "hand."
        )
    case.run(a, b.float())


def test_assigned_gradient() -> None:
    """Law: a gradient of another dtype is recognised, and no operation is made up."""
    weight = torch.rand(2, requires_grad=True)
    error = refusal(setattr, weight, "grad", torch.rand(2, dtype=BF16))
    found = found_in(error)
    assert (found.operation, found.rule) == ("", "")
    assert set(found.dtypes) == {FP32, BF16}
    assert line_of(found).endswith("Cast them to one dtype by hand.")


# One dtype that will not do, and custom functions


class Refused(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.layer = name, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        match self.name:
            case "masked_fill":
                return y.masked_fill(y > 0, -1e9)
            case "logdet":
                return torch.logdet((y @ y.T).abs() + y)
            case _:
                return torch.complex(y, y).abs()


@pytest.mark.parametrize("name", ["masked_fill", "logdet", "complex"])
def test_one_dtype_that_will_not_do(name: str) -> None:
    """Law: operation, module and rule are named, and the rule mends it."""
    model = nn.Sequential(Refused(name))
    low = FP16 if name == "masked_fill" else BF16
    with pytest.raises(DtypeMismatch) as caught, hs.autocast("cpu", low):
        model(torch.rand(4, 4))
    found = caught.value
    assert (found.operation, found.module, found.dtypes) == (name, "0", (low,))
    assert found.rule == f"op:{name}=fp32"
    if name == "masked_fill":
        assert "got -1e+09, which float16 does not hold" in line_of(found)
        assert "torch.finfo(x.dtype).min" in line_of(found)
    with hs.autocast("cpu", low, policy=f"torch + {found.rule}"):
        model(torch.rand(4, 4))


def test_an_observer_of_quantization_is_kept_in_fp32() -> None:
    """Law: no rule reaches an operation that also writes; one reaches its layer."""
    fake = torch.ao.quantization.FusedMovingAvgObsFakeQuantize(quant_max=255)
    model = nn.Sequential(nn.Linear(4, 4), fake)
    with pytest.raises(DtypeMismatch) as caught, hs.autocast("cpu", BF16):
        model(torch.ones(2, 4))
    assert caught.value.rule == "type:FusedMovingAvgObsFakeQuantize=fp32"
    with hs.autocast("cpu", BF16, policy=f"lean + {caught.value.rule}", model=model):
        model(torch.ones(2, 4))


def test_no_rule_is_advised_where_nothing_casts() -> None:
    """Law: under a context that is off, as a session's at O3, no rule would be read."""
    x, cell = torch.ones(4, 4, dtype=BF16), nn.LSTMCell(4, 4, dtype=BF16)
    calls: dict[str, Callable[[], object]] = {
        "Autocast is off here, so no rule": lambda: cell(x, (x.float(), x.float())),
        r"kernel\. Call \.float\(\)\.$": lambda: torch.linalg.det(x),
    }
    for words, call in calls.items():
        with (
            pytest.raises(DtypeMismatch, match=words) as caught,
            hs.autocast("cpu", enabled=False),
        ):
            call()
        assert caught.value.rule == ""


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class Trainer(nn.Module):
    def forward(self, loss: Tensor) -> None:
        loss.backward()


def test_a_custom_function() -> None:
    """Law: the function is named, with the decorators that give it one dtype.

    Who calls backward is no culprit, and no rule reaches it.
    """
    x, weight = torch.rand(2, 2, requires_grad=True), torch.rand(2, 2)
    y = Product.apply(x.bfloat16(), weight.requires_grad_())
    found = found_in(refusal(Trainer(), y.sum()))
    line = line_of(found)
    assert " in Product.backward got bfloat16 (grad), float32 (weight" in line
    assert (found.module, found.rule) == ("", "")
    assert "Decorate Product.forward with halfstep.custom_fwd(device_type='cpu', " in (
        line
    )
    assert "Product.backward with halfstep.custom_bwd(device_type='cpu')" in line


def test_a_session_explains_a_backward_pass() -> None:
    """Law: torch's error in a backward pass becomes ours."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    session = hs.prepare(model, optimizer, "O1", dtype="bf16")
    with session.autocast():
        y = Product.apply(session.model(torch.rand(2, 2)), torch.rand(2, 2))
    with pytest.raises(DtypeMismatch, match=r"custom_bwd"):
        session.backward(y.float().sum())
