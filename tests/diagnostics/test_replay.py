"""First bad operation: in sessions, behind scalers, and what a replay leaves alone."""

import math
from typing import Any

import pytest
import torch
from required import required
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.scaling import ScaleRule

WARNED = pytest.mark.filterwarnings("ignore:level O. with dtype fp16")


class Net(nn.Module):
    """A layer that overflows in fp16, between two that do not."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.outer = nn.Linear(8, 1)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x)) * self.factor
        return self.outer(self.norm(self.wide(hidden)))


X = torch.linspace(-1, 1, 32).view(4, 8)


def prepared(model: nn.Module, level: str) -> hs.Session:
    """Return a session that gives up after three skips."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rule = ScaleRule(max_consecutive_skips=3)
    return hs.prepare(model, optimizer, level, dtype="fp16", loss_scale=rule)


def lost(session: hs.Session) -> hs.LossScaleCollapse:
    """Train until that ends; return how."""

    def train() -> None:
        for _ in range(20):
            with session.autocast():
                loss = session.model(X).float().square().mean()
            session.backward(loss)
            session.step()

    with pytest.raises(hs.LossScaleCollapse) as caught:
        train()
    return caught.value


@WARNED
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_session_that_collapsed_is_asked(level: str, *, compiled: bool) -> None:
    """Law: after a collapse the model and the step tell module and operation."""
    model = Net(9e4 if level == "O1" else 6e4)
    with torch.no_grad():
        model.wide.weight.fill_(1.0)
    session = prepared(model, level)
    error = lost(session)
    assert error.bad_op is not None
    assert not error.bad_op.reproduced
    if compiled:
        session.model = torch.compile(session.model, backend="eager")
    before = {k: v.clone() for k, v in session.model.state_dict().items()}

    def step() -> Tensor:
        with session.autocast():
            return session.model(X).float().square().mean()

    bad = required(
        hs.find_nonfinite(session.model, step, scale=error.history[-1], number=3)
    )
    assert (bad.module, bad.op, bad.cause) == ("wide", "linear", "forward range")
    assert bad.rule == "module:wide=fp32"
    error.attach_replay(bad)
    assert error.bad_op == bad
    assert str(bad) in str(error)
    after = session.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(p.grad is None for p in session.model.parameters())


SENTENCE = (
    "wide (linear) produced inf at step 812: its result reaches 2.0e+05, float16 holds "
    "65504; in float32 the result is finite. Keep it in float32 (rule "
    "'module:wide=fp32') or train in bfloat16."
)


def test_the_sentence() -> None:
    """Law: it names module, operation, step, input, limit and remedy."""
    model = Net()
    with torch.no_grad():
        model.wide.weight.fill_(5e4)
        model.inner.weight.fill_(0.0)
        model.inner.bias.fill_(math.atanh(0.5))

    def step() -> Tensor:
        with hs.autocast("cpu", torch.float16):
            return model(X).float().mean()

    bad = hs.find_nonfinite(model, step, scale=2.0**10, number=812)
    assert str(bad) == SENTENCE


def test_a_weight_cast_before_the_replay_is_known() -> None:
    """Law: a weight that fp16 does not hold is told, though its cast was kept."""
    model, cache = Net(), hs.CastCache()
    with torch.no_grad():
        model.wide.weight[0, 0] = 1e5

    def step() -> Tensor:
        with hs.autocast("cpu", torch.float16, cache=cache):
            return model(X).float().square().mean()

    step()
    bad = required(hs.find_nonfinite(model, step))
    assert (bad.module, bad.op, bad.cause) == ("wide", "linear", "forward range")
    assert bad.inputs == 1e5


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_elsewhere_and_hooks(*, reentrant: bool) -> None:
    """Law: parameters outside of the model gain no gradient, nor does any hook run.

    Such a hook may be an optimizer: then the weights would move.
    """
    model, head = nn.Linear(8, 8), nn.Linear(8, 1)
    inputs = X.clone().requires_grad_()
    ran: list[Tensor] = []
    for leaf in (*model.parameters(), *head.parameters()):
        leaf.register_post_accumulate_grad_hook(ran.append)

    def step() -> Tensor:
        hidden = checkpoint(model, inputs, use_reentrant=reentrant)
        return head(hidden).sum()

    inputs.grad = torch.ones_like(X)
    assert not hs.find_nonfinite(model, step)
    assert not ran
    assert head.weight.grad is None
    assert torch.equal(inputs.grad, torch.ones_like(X))
    step().backward()
    assert len(ran) == 4


def test_a_probe_sees_no_replay() -> None:
    """Law: the step after a replay has the flags of its own passes alone."""
    model = Net()
    with hs.Probe(model) as probe:
        assert hs.find_nonfinite(model, lambda: model(X * math.nan).sum())
        model(X).sum().backward()
        probe.step()
        assert not probe.non_finite
        model(X * math.nan).sum().backward()
        probe.step()
        assert probe.non_finite


LOSSES: list[tuple[list[float], str]] = [
    ([], "forward range"),
    ([1.0] * 100, "forward range"),
    ([1.0, 1.5, 9.0], "learning rate"),
    ([1.0] * 60 + [40.0], "learning rate"),
    ([1.0], "learning rate"),
    ([1.0, 1.0], "learning rate"),
    ([1.0, 0.9], "forward range"),
]


@pytest.mark.parametrize(("losses", "cause"), LOSSES)
def test_the_learning_rate_needs_a_history(losses: list[float], cause: str) -> None:
    """Law: it is named where the loss ran away, or the pass worked a few times only.

    A loss that fell acquits it. Unless the loss ran away, the rule that ends the
    overflow is named too.
    """
    model = Net()
    nn.init.constant_(model.wide.weight, 6e4)

    def step() -> Tensor:
        with hs.autocast("cpu", torch.float16):
            return model(X).float().mean()

    bad = required(hs.find_nonfinite(model, step, losses=losses))
    assert (bad.module, bad.cause) == ("wide", cause)
    rule = "" if "the loss went from" in bad.evidence else "module:wide=fp32"
    assert bad.rule == rule
    assert f"(rule '{rule}')" in bad.advice or not rule


def test_nothing_that_torch_did() -> None:
    """Law: a result that no operation made is not blamed on one."""

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            del ctx
            return torch.from_numpy(x.detach().numpy() * float("nan")).sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            del ctx
            return grad.expand(4, 8)

    model = nn.Linear(8, 8)
    bad = required(hs.find_nonfinite(model, lambda: Odd.apply(model(X))))
    assert bad.nonfinite_kind == "NaN"
    assert bad.reproduced
    outside = torch.from_numpy(X.numpy()[0, :1] * math.nan)
    bad = required(hs.find_nonfinite(model, lambda: outside))
    assert "none of the 0 traced operations of torch made it" in bad.evidence


def test_nan_of_small_numbers_is_no_matter_of_range() -> None:
    """Law: an operation whose flaw is not known is told to be undefined, no more."""
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 1))
    with torch.no_grad():
        model.get_parameter("parametrizations.weight.original1").zero_()
    bad = required(hs.find_nonfinite(model, lambda: model(X).sum()))
    assert (bad.module, bad.cause) == ("parametrizations.weight.0", "zero")
    assert "yet its inputs reach" in bad.evidence


def test_a_hook_that_spoils_a_gradient() -> None:
    """Law: what a hook on a parameter makes is told at the parameter's module."""
    model = Net()
    model.wide.weight.register_hook(lambda grad: grad * math.inf)
    bad = required(hs.find_nonfinite(model, lambda: model(X).sum()))
    assert (bad.module, bad.op, bad.phase) == ("wide", "mul", "backward")


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * self.weight).real


def test_kinds_of_tensors() -> None:
    """Law: complex, sparse and batched tensors, and second slopes, are looked at."""
    model: nn.Module = Waves()
    assert not hs.find_nonfinite(model, lambda: model(X).sum())
    with torch.no_grad():
        model.weight[0] = math.nan
    bad = required(hs.find_nonfinite(model, lambda: model(X).sum()))
    assert bad.cause == "weight"
    words = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 1))
    ids = torch.tensor([1, 8])
    assert not hs.find_nonfinite(words, lambda: words(ids).sum())
    line = nn.Linear(8, 1)
    assert not hs.find_nonfinite(line, lambda: torch.vmap(line)(X).sum())
    net = Net()

    def penalty(power: float) -> Tensor:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad((net(x) * power).sum(), x, create_graph=True)
        return slope.square().sum(1).sqrt().mean()

    assert not hs.find_nonfinite(net, lambda: penalty(1.0))
    bad = required(hs.find_nonfinite(net, lambda: penalty(0.0)))
    assert (bad.op, bad.cause, bad.phase) == ("sqrt", "zero", "backward")


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_gpu(*, reentrant: bool | None) -> None:
    """Law: on a GPU, where backward passes run in threads of their own, it is told."""
    from torch.utils.checkpoint import checkpoint

    for factor, phase in ((9e4, "forward"), (1.0, "backward")):
        model = Net(factor).cuda()
        if phase == "forward":
            nn.init.ones_(model.wide.weight)
        x = X.cuda().requires_grad_()

        def step(model: Net = model, x: Tensor = x) -> Tensor:
            with hs.autocast("cuda", torch.float16):
                if reentrant is None:
                    return model(x).float().square().mean()
                out = checkpoint(model, x, use_reentrant=reentrant)
                return out.float().square().mean()

        state = torch.cuda.get_rng_state()
        scale = 2.0**10 if phase == "forward" else 2.0**26
        assert not hs.find_nonfinite(Net().cuda(), lambda: step(Net().cuda()))
        bad = hs.find_nonfinite(model, step, scale=scale)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert bad
        assert bad.phase == phase
        if phase == "forward":
            assert (bad.module, bad.op) == ("wide", "linear")
        else:
            assert bad.module in {"inner", "wide", "norm", "outer", "model", "loss"}
            assert bad.cause == "backward range"


# What cannot be run again


MODEL = nn.Linear(2, 2)
ONES = torch.ones(3, 2)


def with_backward() -> Any:
    loss = MODEL(ONES).square().sum()
    loss.backward()
    return loss


def evaluated() -> Tensor:
    with torch.no_grad():
        return MODEL(ONES).sum()


def summed() -> Tensor:
    return MODEL(ONES).sum()


REFUSED: dict[str, dict[str, Any]] = {
    "model is of type function": {"model": evaluated},
    "step is of type NoneType": {"step": None},
    "step=<list> must be a function": {"step": []},
    "step is of type str": {"step": [summed, "loss"]},
    "step ran the backward pass itself": {"step": with_backward},
    "returned a NoneType": {"step": lambda: None},
    r"a tensor of shape \(3, 2\) and torch.float32": {"step": lambda: MODEL(ONES)},
    r"shape \(\) and torch.int64": {"step": lambda: ONES.sum().long()},
    # Neither cleared nor laid to the hardware.
    "'evaluated' returned a loss without a graph": {"step": evaluated, "failed": True},
    r"scale=0\.0": {"scale": 0.0},
    "scale='big'": {"scale": "big"},
}


@pytest.mark.parametrize("says", REFUSED)
def test_refused(says: str) -> None:
    """Law: the message holds the value, in few words; one number of any shape will do.

    A fault of the forward pass is found without a graph.
    """
    given: dict[str, Any] = {"model": MODEL, "step": summed} | REFUSED[says]
    with pytest.raises(hs.UserError, match=says) as caught:
        hs.find_nonfinite(**given)
    assert len(str(caught.value).split()) <= 35
    assert not hs.find_nonfinite(MODEL, lambda: summed()[None])
    with torch.no_grad():
        assert hs.find_nonfinite(MODEL, lambda: evaluated() * math.nan)


def test_inference_mode_is_left() -> None:
    """Law: inside torch.inference_mode, gradients are looked at all the same."""

    def step() -> torch.Tensor:
        return (MODEL(ONES) * 0).sqrt().sum()

    with torch.inference_mode():
        bad = hs.find_nonfinite(MODEL, step)
    assert bad
    assert (bad.op, bad.phase) == ("sqrt", "backward")
