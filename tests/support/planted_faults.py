"""Faults planted in small models: what is wrong, and what must be said of it.

In: nothing. Out: `FAULTS`, by name, each with the module, the operation and the cause
that are expected, written down before anything looked for them; and `HEALTHY` runs, in
which nothing may be found.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from planted_models import (
    BEFORE,
    CLASSES,
    INNER,
    NEXT,
    WORDS,
    batch,
    build,
    inside,
    loss_of,
)
from torch import Tensor, nn
from torch.nn import functional

from halfstep.diagnostics.replay import find_nonfinite
from halfstep.nonfinite.origin import BadOp


@dataclass
class Run:
    """A model, its batch and how it is run; a plant changes any of these."""

    name: str
    mode: str = "eager"
    """Also "plain" and "reentrant", which recompute; "ddp"."""
    dtype: torch.dtype | None = torch.float16
    """Of autocast; None for none."""
    scale: float = 2.0**10
    rule: str = ""
    """A policy row to run under."""
    more: dict[str, Any] = field(default_factory=dict)
    """What else the replay is told."""

    def __post_init__(self) -> None:
        self.model = build(self.name)
        self.batch = batch(self.name)
        self.loss_of: Callable[[Tensor, Tensor], Tensor] = loss_of
        for module in self.model.modules():
            if hasattr(module, "recompute") and self.mode in {"plain", "reentrant"}:
                module.recompute = self.mode

    def wrapped(self) -> nn.Module:
        """Return the model as it is called."""
        if self.mode == "ddp":
            return nn.parallel.DistributedDataParallel(self.model)
        return self.model

    def step(self, model: nn.Module) -> Tensor:
        """Return the loss of the batch."""
        inputs = dict(self.batch)
        labels = inputs.pop("labels")
        with self.region():
            return self.loss_of(model(**inputs), labels)

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """Return what the forward pass runs under."""
        if self.dtype is None:
            return contextlib.nullcontext()
        if self.rule:
            import halfstep as hs

            policy = f"torch + {self.rule}"
            return hs.autocast("cpu", self.dtype, policy=policy, model=self.model)
        return torch.autocast("cpu", self.dtype)

    def spoilt(self) -> tuple[bool, bool]:
        """Say whether the loss, and whether a gradient, is not finite: torch's word."""
        model = self.wrapped()
        try:
            value = self.step(model)
        except (IndexError, RuntimeError):
            return True, True
        (value * self.scale).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        good = all(bool(grad.isfinite().all()) for grad in grads)
        return not bool(value.isfinite()), not good

    def found(self) -> BadOp | None:
        """Return what a replay finds."""
        model = self.wrapped()
        step = partial(self.step, model)
        return find_nonfinite(model, step, scale=self.scale, **self.more) or None


@dataclass(frozen=True)
class Fault:
    """What is planted, and what must be said of it."""

    plant: Callable[[Run], None]
    run: dict[str, Any]
    module: str
    ops: str
    """Words that will do for the operation; "" for any."""
    cause: str
    phase: str
    curable: bool = True
    """Rows can cure it: its numbers fit float32, and its code does no cast itself."""
    at_once: bool = False
    """The first of them must."""

    def judge(self, found: BadOp | None) -> tuple[bool, bool, bool]:
        """Say whether module, operation and cause are right."""
        if found is None:
            return False, False, False
        return (
            found.module == self.module,
            not self.ops or found.op in self.ops.split(),
            found.cause == self.cause and found.phase == self.phase,
        )


FAULTS: dict[str, Fault] = {}


def add(
    name: str,
    plant: Callable[[Run], None],
    module: str,
    ops: str,
    cause: str,
    phase: str = "forward",
    *,
    curable: bool = True,
    at_once: bool = False,
    **run: Any,
) -> None:
    """Write down a fault; its name begins with the model's."""
    run = {"name": name.split(maxsplit=1)[0]} | run
    name += f" {run.get('mode', '')}".rstrip()
    assert name not in FAULTS
    FAULTS[name] = Fault(plant, run, module, ops, cause, phase, curable, at_once)


# What is planted


def overflow(run: Run) -> None:
    """Weights that fit, and a product that does not."""
    weight = run.model.get_submodule(INNER[run.name]).weight
    with torch.no_grad():
        weight.copy_(torch.where(weight < 0, -6e4, 6e4))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    # Make what float16 does not hold, in float32.
    "large": lambda y: y.float() * 1e6,
    # Divide by zero.
    "divided": lambda y: y / (y - y),
    # Take the logarithm of zero.
    "logged": lambda y: y + torch.log((y * 0).float()),
    # Take a root at zero, where its slope is infinite.
    "rooted": lambda y: y + torch.sqrt((y * 0).float()),
    # Change nothing on the way forward; amplify gradients on the way back.
    "amplified": lambda y: (y / 3e4) * 3e4,
    # Divide a vector of zeros by its length.
    "unit": lambda y: (y * 0).float() / (y * 0).float().norm(dim=-1, keepdim=True),
    # Add to a divisor what float16 takes for 0.
    "lost_eps": lambda y: y + (y * 0).half() / ((y * 0).half() + 1e-9),
    # Norm without its small number.
    "bare_rms": lambda y: (
        (y * 0).float() * torch.rsqrt((y * 0).float().pow(2).mean(-1, keepdim=True))
    ),
    # Raise zero to a half, whose slope there is infinite.
    "power": lambda y: y + (y * 0).float() ** 0.5,
    # Take the angle between equal directions.
    "angle": lambda y: y + torch.acos((y * 0).float() + 1),
    # Hide the logarithm of zero from the loss, and not from the gradient.
    "hidden_log": lambda y: y + torch.where(y * 0 > 0, torch.log((y * 0).float()), 0.0),
    # Leave float32 too.
    "exponential": lambda y: torch.exp(y.float() * 0 + 100),
    # Leave float16 by a product of two numbers that fit.
    "squares": lambda y: y + (y * 0 + 300).half() * (y * 0 + 300).half(),
    # Hide an overflow from the loss, and not from the gradient.
    "logistic": lambda y: y + 1 / (1 + torch.exp(y.float() * 0 + 100)),
    # Make -inf, and take it out again.
    "mended": lambda y: (
        y + torch.nan_to_num(torch.log((y * 0).float().detach()), 0, 0, 0)
    ),
}
"""What a module may do to its result."""


Change = "str | Callable[[Tensor], Tensor]"


def named(path: str, change: Change) -> Callable[[Run], None]:
    """Return what lets one module change its result, perhaps by one of `CHANGES`."""
    if isinstance(change, str):
        change = CHANGES[change]
    return lambda run: inside(run.model, path, change)


def at(places: dict[str, str], change: Change) -> Callable[[Run], None]:
    return lambda run: named(places[run.name], change)(run)


def spoilt_weight(run: Run) -> None:
    """A weight that holds NaN."""
    with torch.no_grad():
        run.model.get_submodule(INNER[run.name]).weight.view(-1)[0] = math.nan


def product(name: str) -> str:
    """Return the word of the product in the middle of a model."""
    return "conv2d" if name == "cnn" else "linear"


def common(name: str, kinds: str, mode: str = "eager") -> None:
    """Plant what can be planted in any model."""
    inner, before = INNER[name], BEFORE[name]
    # A ReLU takes -inf out of the loss, not out of the gradient.
    late = "backward" if name == "cnn" else "forward"
    rows: dict[str, tuple[Any, ...]] = {
        "overflow": (overflow, inner, product(name), "forward range"),
        "cast": (at(BEFORE, "large"), NEXT[name], product(name), "forward range"),
        "div": (at(INNER, "divided"), inner, "div", "zero"),
        "log": (at(BEFORE, "logged"), before, "log", "zero", late),
        "root": (at(INNER, "rooted"), inner, "sqrt", "zero", "backward"),
        "amplified": (
            at(INNER, "amplified"),
            inner,
            "mul",
            "backward range",
            "backward",
        ),
        "weight": (spoilt_weight, inner, "", "weight", "weight"),
    }
    for kind in kinds.split():
        plant, *expected = rows[kind]
        scale = 2.0**16 if kind == "amplified" else 2.0**10
        # Behind T5's last layer is a norm in fp32, so nothing stays large.
        once = kind == "overflow" and name == "t5"
        add(f"{name} {kind}", plant, *expected, mode=mode, scale=scale, at_once=once)


for each in INNER:
    common(each, "overflow cast div log root amplified weight")
common("bert", "cast amplified", "plain")
common("gpt", "div weight", "plain")
common("t5", "root overflow", "plain")
common("t5", "overflow cast", "reentrant")
common("gpt", "log amplified", "reentrant")
common("mlp", "overflow", "ddp")
common("cnn", "cast root", "ddp")
common("lstm", "root", "ddp")
common("bert", "amplified div", "ddp")


def put(key: str, value: float) -> Callable[[Run], None]:
    """Return what puts one value into a batch."""

    def plant(run: Run) -> None:
        run.batch[key] = run.batch[key].clone()
        run.batch[key].view(-1)[1] = value

    return plant


add("mlp data nan", put("x", math.nan), "fc1", "linear", "data", "input")
add("mlp data nan", put("x", math.nan), "fc1", "linear", "data", "input", mode="ddp")
add("cnn data inf", put("x", math.inf), "conv1", "conv2d", "data", "input")
add("lstm data nan", put("x", math.nan), "inner", "linear", "data", "input")
add("mlp data huge", put("x", 1e6), "fc1", "linear", "data")
add("cnn data huge", put("x", -7e5), "conv1", "conv2d", "data")
add("bert data word", put("ids", WORDS), "words", "embedding", "data", "input")
add("t5 data word", put("before", -3), "shared", "embedding", "data", "input")

CROSS = "nll_loss cross_entropy nll_loss2d"
add("mlp label range", put("labels", CLASSES), "loss", CROSS, "label", "input")
add("gpt label range", put("labels", WORDS + 7), "loss", CROSS, "label", "input")
add("bert label range", put("labels", -1), "loss", CROSS, "label", "input")


def all_ignored(run: Run) -> None:
    """Labels that all say "leave me out"."""
    run.batch["labels"] = torch.full_like(run.batch["labels"], -100)


def regression(run: Run) -> None:
    """A target that is not a number."""
    run.batch["labels"] = torch.zeros(len(run.batch["labels"]), CLASSES)
    run.batch["labels"][1, 2] = math.nan
    run.loss_of = lambda y, t: functional.mse_loss(y.float(), t)


def class_masked(run: Run) -> None:
    """A class that a target names is masked out."""
    gone = functional.one_hot(run.batch["labels"][0], CLASSES).bool()
    inside(run.model, "head", lambda y: y.masked_fill(gone, -math.inf))


add("gpt label ignored", all_ignored, "loss", CROSS, "label")
add("mlp label nan", regression, "loss", "mse_loss", "label", "input")
add("lstm label nan", regression, "loss", "mse_loss", "label", "input")
add("bert label masked", class_masked, "head", "masked_fill", "label")


def none_kept(run: Run) -> None:
    """A text of padding alone."""
    run.batch["keep"][1] = False


def no_past(run: Run) -> None:
    """A causal mask that hides a place from itself."""
    run.model.mask[0, 0] = -math.inf


ATTEND = "softmax"
add("bert zero row", none_kept, "encoder.layers.0.attention", ATTEND, "zero")
add(
    *("bert zero row", none_kept, "encoder.layers.0.attention", ATTEND, "zero"),
    mode="plain",
)
add("gpt zero row", no_past, "h.layers.0.attention", ATTEND, "zero")
add("t5 zero row", no_past, "decoder.layers.0.attention", ATTEND, "zero")


def flat_norm(run: Run) -> None:
    """A layer norm of equal numbers, without its small number."""
    run.model.norm.eps = 0.0
    for parameter in run.model.fc1.parameters():
        nn.init.zeros_(parameter)


def lone(y: Tensor) -> Tensor:
    """Divide by the deviation of a single number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch sees it too
        return y + y.float()[:, :1].std(1, keepdim=True)


add("mlp zero norm", flat_norm, "norm", "layer_norm", "zero")
add("mlp zero unit", at(BEFORE, "unit"), "norm", "div", "zero")
add("lstm zero std", at(INNER, lone), "outer", "std var", "zero")
add("bert zero eps", at(INNER, "lost_eps"), INNER["bert"], "div", "zero")
add("t5 zero rsqrt", at(BEFORE, "bare_rms"), BEFORE["t5"], "rsqrt", "zero")
add("gpt zero power", at(INNER, "power"), INNER["gpt"], "pow", "zero", "backward")
add("cnn zero angle", at(INNER, "angle"), INNER["cnn"], "acos", "zero", "backward")
add("t5 zero hidden", at(INNER, "hidden_log"), INNER["t5"], "log", "zero", "backward")
add(
    *("bert zero hidden", at(INNER, "hidden_log"), INNER["bert"], "log", "zero"),
    *("backward",),
    mode="plain",
)


def loss(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Run], None]:
    """Return what trains with another loss."""

    def plant(run: Run) -> None:
        run.loss_of = function

    return plant


def log_loss(y: Tensor, t: Tensor) -> Tensor:
    """Take the logarithm of a probability of zero."""
    return -(y.float().softmax(-1).gather(-1, t[:, None]) * 0).log().mean()


def entropy(y: Tensor, t: Tensor) -> Tensor:
    """Compute p log p, and forget that p may be 0."""
    del t
    share = (y.float() * 1e4).softmax(-1)
    return (share * share.log()).sum(-1).mean()


def root_loss(y: Tensor, t: Tensor) -> Tensor:
    """Take the root of a mean squared error of zero."""
    del t
    return (y - y.detach()).float().pow(2).mean().sqrt()


add("mlp loss log", loss(log_loss), "loss", "log", "zero")
add("cnn loss entropy", loss(entropy), "loss", "log", "zero")
add("lstm loss root", loss(root_loss), "loss", "sqrt", "zero", "backward")
add(
    *("mlp loss squares", loss(lambda y, _: (y.half() * 9e3).square().sum())),
    *("loss", "square pow mul", "loss function"),
)
add(
    "bert loss inf",
    loss(lambda y, _: y.sum() * math.inf),
    "loss",
    "mul",
    "loss function",
)
add(
    *("cnn loss exp", loss(lambda y, _: (y.float() * 0 + 200).exp().mean())),
    *("loss", "exp", "loss function"),
)
for each in ("mlp", "gpt", "t5"):
    add(
        *(f"{each} loss sum", loss(lambda y, _: y.float().sum() * 1e9)),
        *("loss", "to cast _to_copy", "loss function", "backward"),
    )


def steep(run: Run) -> None:
    """Queries and keys that fit, and scores that do not."""
    path = {"gpt": "h.layers.1.attention", "bert": "encoder.layers.1.attention"}
    path["t5"] = "decoder.layers.1.across"
    for part in ("q", "k"):
        inside(run.model, f"{path[run.name]}.{part}", lambda y: y * 2000)


RANGE = "forward range"
add(*("mlp range exp", named("fc1", "exponential"), "fc1", "exp", RANGE), curable=False)
for each in ("lstm", "cnn"):
    add(
        *(f"{each} range squares", at(INNER, "squares"), INNER[each], "mul", RANGE),
        curable=False,
    )
add("gpt range scores", steep, "h.layers.1.attention", "matmul bmm", RANGE)
add("bert range scores", steep, "encoder.layers.1.attention", "matmul bmm", RANGE)
add("t5 range scores", steep, "decoder.layers.1.across", "matmul bmm", RANGE)
add(
    *("t5 range scores", steep, "decoder.layers.1.across", "matmul bmm", RANGE),
    mode="plain",
)
add("mlp range hidden", at(INNER, "logistic"), "fc2", "exp", RANGE, curable=False)
for kind, dtype in (("bf16", torch.bfloat16), ("fp32", None)):
    for each in ("bert", "lstm"):
        add(
            *(f"{each} range {kind}", at(INNER, lambda y: (y * 1e30) * 1e30)),
            *(INNER[each], "mul", RANGE),
            curable=False,
            dtype=dtype,
            scale=1.0,
        )


def weight_beyond(run: Run) -> None:
    """A weight that float16 does not hold."""
    with torch.no_grad():
        run.model.get_submodule(INNER[run.name]).weight.view(-1)[0] = 1e5


def statistics(run: Run) -> None:
    """A running variance that is not a number, in use."""
    run.model.eval()
    run.model.bn2.running_var[3] = math.nan


add("mlp range weight", weight_beyond, "fc2", "linear", RANGE)
add("lstm range weight", weight_beyond, "outer", "linear", RANGE)
add("cnn weight statistics", statistics, "bn2", "batch_norm", "weight", "weight")


def steepened(y: Tensor) -> Tensor:
    """Change nothing on the way forward; on the way back leave float16 at any scale."""
    wide = y.float() * 1e9
    return y.float() + (wide - wide.detach())


BACK = ("backward range", "backward")
for each in ("bert", "lstm", "cnn"):
    # At scale 1 too: no halving helps.
    add(
        *(f"{each} back always", at(INNER, steepened)),
        *(INNER[each], "to cast _to_copy", *BACK),
        scale=1.0,
    )


def ran_away(run: Run) -> None:
    """Some steps at a rate that is far too high."""
    rate = {"mlp": 3e3, "cnn": 1e4, "lstm": 1e4, "gpt": 3e3}[run.name]
    optimizer = torch.optim.SGD(run.model.parameters(), lr=rate)
    losses = []
    for _ in range(30):
        value = run.step(run.model)
        scaled = value * run.scale
        optimizer.zero_grad()
        scaled.backward()
        for parameter in run.model.parameters():
            parameter.grad /= run.scale
        grads = [parameter.grad for parameter in run.model.parameters()]
        if not (value.isfinite() and all(bool(g.isfinite().all()) for g in grads)):
            break
        losses.append(value.item())
        optimizer.step()
    assert not value.isfinite(), "it has not run away"
    run.more["losses"] = losses


def oracle(name: str, plant: Callable[[Run], None]) -> str:
    """Return the innermost module whose result was the first to be not finite."""
    run, seen = Run(name), []
    plant(run)
    for path, module in run.model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda _m, _i, out, path=path: seen.append((path, out))
            )
    run.step(run.model)
    outs = ((path, out[0] if isinstance(out, tuple) else out) for path, out in seen)
    return next(path for path, out in outs if not out.isfinite().all())


for each in ("mlp", "lstm", "gpt"):
    add(
        *(f"{each} learning rate", ran_away, oracle(each, ran_away), ""),
        "learning rate",
    )


def struck(run: Run) -> None:
    """A number is wrong once, and never again: the run that failed was that one."""
    bad = [True]

    def strike(y: Tensor) -> Tensor:
        return y * (math.nan if bad and bad.pop() else 1.0)

    inside(run.model, INNER[run.name], strike)
    assert not run.step(run.model).isfinite()


for each in ("mlp", "bert", "lstm"):
    add(f"{each} hardware", struck, "model", "", "hardware", "none")


# Healthy runs: infinities that are meant, or that nothing takes in


def nothing(run: Run) -> None:
    """Change nothing."""


def where_log(y: Tensor) -> Tensor:
    """Take a logarithm only where there is one."""
    wide = y.float()
    good = wide > 0
    return y + torch.where(good, torch.log(torch.where(good, wide, 1.0)), 0.0)


def unused_log(y: Tensor) -> Tensor:
    """Compute something infinite, and use it for nothing that counts."""
    torch.log(y * 0)
    with torch.no_grad():
        (y / (y - y)).mean()
    return y


def top(y: Tensor) -> Tensor:
    """Keep the largest logits alone."""
    least = y.topk(4, -1).values[..., -1:]
    return y + y.masked_fill(y < least, -math.inf).softmax(-1)


def summed_up(y: Tensor) -> Tensor:
    """Sum exponentials of what is partly masked."""
    odd = torch.arange(y.shape[-1]) % 2 == 1
    return y + y.float().masked_fill(odd, -math.inf).logsumexp(-1, keepdim=True)


def scratch(y: Tensor) -> Tensor:
    """Write into memory that held anything."""
    left = torch.empty_like(y).fill_(math.nan)
    left.copy_(y)
    least = torch.full_like(y, math.inf)
    return torch.minimum(left, least)


def fused(run: Run) -> None:
    """Let torch's own attention see a mask of -inf."""
    module = run.model.get_submodule("h.layers.0.attention")

    def forward(x: Tensor, other: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in (module.q(x), module.k(other), module.v(other))
        )
        out = functional.scaled_dot_product_attention(q, k, v, mask.to(q.dtype))
        return module.o(out.transpose(1, 2).flatten(2))

    module.forward = forward


def partly_ignored(run: Run) -> None:
    """Leave out some labels."""
    run.batch["labels"][0] = -100


def ctc(y: Tensor, t: Tensor) -> Tensor:
    """Align with targets, inside of which -inf stands for 0."""
    del t
    steps = y.float()[:, None].log_softmax(-1)
    targets = torch.tensor([[1, 2]])
    return functional.ctc_loss(
        steps, targets, torch.tensor([len(y)]), torch.tensor([2])
    )


HEALTHY: dict[str, tuple[Callable[[Run], None], dict[str, Any]]] = {
    **{each: (nothing, {"name": each}) for each in INNER},
    "bert bf16": (nothing, {"name": "bert", "dtype": torch.bfloat16, "scale": 1.0}),
    "cnn fp32": (nothing, {"name": "cnn", "dtype": None, "scale": 1.0}),
    "gpt plain": (nothing, {"name": "gpt", "mode": "plain"}),
    "t5 reentrant": (nothing, {"name": "t5", "mode": "reentrant"}),
    "lstm ddp": (nothing, {"name": "lstm", "mode": "ddp"}),
    "bert log where": (at(INNER, where_log), {"name": "bert"}),
    "mlp unused": (at(INNER, unused_log), {"name": "mlp"}),
    "t5 mended": (at(INNER, "mended"), {"name": "t5"}),
    "gpt top": (at(BEFORE, top), {"name": "gpt"}),
    "lstm sums": (at(INNER, summed_up), {"name": "lstm"}),
    "mlp scratch": (at(BEFORE, scratch), {"name": "mlp"}),
    "gpt fused": (fused, {"name": "gpt"}),
    "bert ignored": (partly_ignored, {"name": "bert"}),
    "mlp ctc": (loss(ctc), {"name": "mlp"}),
    "cnn evaluated": (lambda run: run.model.eval() and None, {"name": "cnn"}),
    "t5 fused plain": (at(BEFORE, summed_up), {"name": "t5", "mode": "plain"}),
}


def planted(name: str, *, failed: bool = False, **given: Any) -> Run:
    """Return the run of a fault, or of a healthy oddity; `failed`: so it is told."""
    plant, run = HEALTHY.get(name) or (FAULTS[name].plant, FAULTS[name].run)
    result = Run(**run, **given)
    plant(result)
    result.more["failed"] = failed
    return result
