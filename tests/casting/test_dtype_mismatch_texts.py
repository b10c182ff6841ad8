"""Errors about mismatching dtypes by their texts, and others that resemble them."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional

from halfstep.casting.dtype_mismatch import DtypeMismatch, explain

if TYPE_CHECKING:
    from collections.abc import Callable

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
COMPLEX64 = torch.complex64
REFUSED = "expected scalar type Half but found Float"


def error_of(run: Callable[[], object]) -> RuntimeError:
    """Return what a call raises."""
    with pytest.raises(RuntimeError) as caught:
        run()
    return caught.value


def of(text: str) -> DtypeMismatch | None:
    """Return what is said about an error that was never raised."""
    return explain(RuntimeError(text))


class Refuses(nn.Module):
    """Raises what a kernel would that is not here."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def forward(self) -> None:
        """Raise."""
        raise RuntimeError(self.text)


ON_CUDA = "Input type ({}) and weight type ({}) should be the same"
MATRICES = "expected m1 and m2 to have the same dtype, but got: {} != {}"
HALF, FLOAT = "torch.cuda.HalfTensor", "torch.cuda.FloatTensor"

HIDDEN_STATE = (
    "Input and hidden tensors are not the same dtype, found input tensor with Half and "
    "hidden tensor with Float"
)
MASK = (
    "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
    "attn_mask.dtype: c10::BFloat16 and  query.dtype: double instead."
)
BAG = (
    "Expected tensor for argument #1 'weight' to have the same type as tensor for "
    f"argument #1 'per_sample_weights'; but type {HALF} does not equal {FLOAT} (while "
    "checking arguments for embedding_bag)"
)
TRACED = (
    "RuntimeError when making fake tensor call\n  Explanation: Dynamo failed to run FX "
    "node: got RuntimeError('expected dtype torch.float32 for `end`, but got dtype "
    "torch.bfloat16')\n  Hint: Please double check your code."
)

TEXTS = [
    (REFUSED, FP16, FP32),
    ("expected scalar type Float but found c10::Half", FP32, FP16),
    ("Found dtype Double but expected Float", FP64, FP32),
    (MATRICES.format("float", "struct c10::Half"), FP32, FP16),
    (MATRICES.format("c10::complex<float>", "float"), COMPLEX64, FP32),
    (MATRICES.format("long int", "double"), torch.int64, FP64),
    (ON_CUDA.format(HALF, FLOAT), FP16, FP32),
    (ON_CUDA.format("CUDABFloat16Type", FLOAT), BF16, FP32),
    (ON_CUDA.format("float", "c10::BFloat16").replace("weight", "bias"), FP32, BF16),
    ("masked_scatter: expected same dtypes but gotHalf and Float", FP16, FP32),
    (HIDDEN_STATE, FP16, FP32),
    (MASK, BF16, FP64),
    (BAG, FP16, FP32),
    (TRACED, FP32, BF16),
    ("both inputs should have same dtype",),
    ("scatter(): Expected self.dtype to be equal to src.dtype",),
    ("quantile() q tensor must be same dtype as the input tensor",),
    ("mixed dtype (CPU): all inputs must share same datatype.",),
    ("mixed dtype (CPU): expect parameter to have scalar type of Float", FP32),
    ("assigned grad has data of a different type",),
]


@pytest.mark.parametrize(("text", "dtypes"), [(text, tuple(d)) for text, *d in TEXTS])
def test_texts(text: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Law: texts of other devices and versions tell the dtypes, and no more."""
    found = explain(error_of(Refuses(text)))
    assert found is not None
    assert (found.operation, found.rule, found.dtypes) == ("", "", dtypes)
    assert str(found).startswith(f"{text}\n-> an operation in the model (Refuses) got ")


ONE_DEVICE = "Expected all tensors to be on the same device, but found cuda:0 and cpu!"
LOOK_ALIKES = [
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)",
    "The size of tensor a (3) must match the size of tensor b (2) at dimension 0",
    ONE_DEVICE,
    ON_CUDA.format("torch.FloatTensor", HALF),
    ON_CUDA.format("torch.FloatTensor", "CUDABFloat16Type"),
    "Function 'MulBackward0' returned nan values in its 0th output.",
    "expected scalar type Long but found Float",
    "gather(): Expected dtype int64 for index",
    "index_select(): Expected dtype int32 or int64 for index, but got Float",
    "Expected 'indices' to have scalar type Long, Int; but got torch.FloatTensor",
    MATRICES.format("long int", "int"),
    "result type Float can't be cast to the desired output type Long",
    "quantile() input tensor must be either float or double dtype",
    "Recomputed values have different metadata: torch.float32, torch.bfloat16",
    "torch.nn.functional.binary_cross_entropy is unsafe to autocast.",
    "",
]


@pytest.mark.parametrize("text", LOOK_ALIKES)
def test_look_alikes(text: str) -> None:
    """Law: shapes, devices, indices and NaN are another matter."""
    assert of(text) is None
    assert explain(NotImplementedError(text)) is None


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.rand(2, 3) @ torch.rand(2, 3),
        lambda: torch.rand(2).to(FP16) + torch.rand(3),
        lambda: functional.embedding(torch.rand(2), torch.rand(2, 2)),
        lambda: functional.nll_loss(torch.rand(2, 2), torch.rand(2)),
        lambda: torch.rand(2).gather(0, torch.rand(2)),
        lambda: torch.full((2,), 1, dtype=torch.int64).add_(0.5),
        lambda: torch.rand(2, dtype=FP16).fill_(torch.rand(2)),
        lambda: torch.rand(2, requires_grad=True).add_(1),
    ],
)
def test_other_errors(run: Callable[[], object]) -> None:
    """Law: what torch raises about other things passes, as this torch words it."""
    assert explain(error_of(run)) is None


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, KeyboardInterrupt])
def test_other_exceptions(error: type[BaseException]) -> None:
    """Law: only RuntimeErrors are torch's refusals, whatever they say."""
    assert explain(error(REFUSED)) is None
    assert of(REFUSED) is not None


def test_not_twice() -> None:
    """Law: what has been explained passes through the regions around it."""
    found = of(REFUSED)
    assert found is not None
    assert explain(found) is None


def test_pickle() -> None:
    """Law: it survives the way from a worker process, every attribute with it."""
    sent = DtypeMismatch("text", "mv", "encoder.0", (FP16, FP32), "op:mv=low")
    got = pickle.loads(pickle.dumps(sent))  # noqa: S301 -- our own
    assert (str(got), vars(got)) == ("text", vars(sent))
    assert vars(got) == {
        "operation": "mv",
        "module": "encoder.0",
        "dtypes": (FP16, FP32),
        "rule": "op:mv=low",
    }
