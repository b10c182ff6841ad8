"""`halfstep bench plan`: casts and step times of planned models, against autocast.

Each model is trained under torch.autocast, under the lean policy, at levels O1 and O2,
and as planned by painting and by min-cut for the weights of both levels; all start from
the same weights and take turns. Predicted times are compared with measured ones.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.bench import journal, measure
from halfstep.casting.autocast_mode import autocast
from halfstep.diagnostics.profiling.profile_step import without_kineto_log
from halfstep.graph.op_times import OpTimes
from halfstep.graph.planner import METHODS, device_of, plan
from halfstep.graph.rewrite import rewrite
from halfstep.numerics import formats
from halfstep.numerics.formats import tensors_in
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from halfstep.graph.plan import Plan
    from halfstep.reporting.table import Cell, Table
    from halfstep.session.session import Session

BASELINE = "torch.autocast"
PLANNED = ("min-cut", "min-cut O2")
"""The contenders that the targets apply to."""
MAX_RATIO, MAX_RATIO_OF_FEW_CASTS = 0.9, 1.0
"""Targets of a planned step's time relative to torch.autocast: where casts take at
least `MANY_CASTS` of it, and otherwise."""
MANY_CASTS = 0.1
MAX_CASTS = 0.5
"""Target of a planned model's number of casts, relative to torch.autocast."""
MAX_ERROR = 0.1
"""Target of the prediction: maximum relative error."""
_WARM_UP = 2  # steps of each contender that are not timed

ModelAndBatch = tuple[nn.Module, tuple[Tensor, ...]]
"""A model and its inputs, the last of which are the target classes."""


class WithLoss(nn.Module):
    """A model that returns its cross-entropy, so that the whole step is planned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss; the last of the inputs are the target classes."""
        scores = self.model(*inputs[:-1])
        scores = getattr(scores, "logits", scores)
        return nn.functional.cross_entropy(scores.flatten(0, -2), inputs[-1].flatten())


class _EncoderDecoder(nn.Module):
    """A T5 that takes both of its inputs by position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, target: Tensor) -> Any:  # noqa: ANN401
        return self.model(input_ids=tokens, decoder_input_ids=target)


# Without dropout, so that all contenders have the same losses.


def _tokens(*shape: int, of: int = 4096) -> Tensor:
    return torch.randint(1, of, shape)


def _bert() -> ModelAndBatch:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
        vocab_size=4096,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    return model, (_tokens(32, 128), _tokens(32, of=2))


def _gpt() -> ModelAndBatch:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=256,
        n_layer=4,
        n_head=8,
        n_positions=128,
        vocab_size=4096,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    config.use_cache = False
    return GPT2LMHeadModel(config), (_tokens(8, 128), _tokens(8, 128))


def _t5() -> ModelAndBatch:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=3,
        num_heads=8,
        vocab_size=4096,
        dropout_rate=0.0,
    )
    config.use_cache = False
    model = _EncoderDecoder(T5ForConditionalGeneration(config))
    return model, (_tokens(8, 64), _tokens(8, 64), _tokens(8, 64))


def _resnet() -> ModelAndBatch:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
        layer_type="basic",
    )
    config.num_labels = 10
    images = torch.randn(16, 3, 96, 96)
    return ResNetForImageClassification(config), (images, _tokens(16, of=10))


def _mlp() -> ModelAndBatch:
    sizes = [512, 2048, 2048, 512]
    layers = [
        layer
        for a, b in itertools.pairwise(sizes)
        for layer in (nn.Linear(a, b), nn.ReLU())
    ]
    return nn.Sequential(*layers), (torch.randn(512, 512), _tokens(512, of=512))


MODELS: dict[str, Callable[[], ModelAndBatch]] = {
    "bert": _bert,
    "resnet": _resnet,
    "gpt": _gpt,
    "t5": _t5,
    "mlp": _mlp,
}


@dataclass(frozen=True)
class Contender:
    """One way to train a model."""

    run: nn.Module
    """The module that is called."""
    optimizer: torch.optim.Optimizer | None = None
    make_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    plan: Plan | None = None
    session: Session | None = None

    def forward_backward(self, inputs: tuple[Any, ...]) -> Tensor:
        """Run forward and backward; return the loss, the sum of the outputs."""
        with self.make_context():
            output = self.run(*inputs)
        outputs = [t for t in tensors_in(output) if t.is_floating_point()]
        loss = torch.stack([each.float().sum() for each in outputs]).sum()
        if self.session is not None:
            self.session.backward(loss)
        elif loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self) -> None:
        """Step the optimizer, and clear the gradients."""
        if self.session is not None:
            self.session.step()
        elif self.optimizer is not None:
            self.optimizer.step()
        self.run.zero_grad()


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Train each model with every contender, in turn."""
    device = measure.pick_device(arguments.device)
    dtype = formats.parse(arguments.dtype).dtype
    rows: list[dict[str, Cell]] = []
    verdicts: list[dict[str, Cell]] = []
    for name in arguments.models:
        contenders, inputs = make_contenders(name, device, dtype)
        copies = {n: count_copies(each, inputs) for n, each in contenders.items()}
        casts = {n: list((c - copies["fp32"]).elements()) for n, c in copies.items()}
        passes, steps = train_in_turn(
            name, contenders, inputs, device, arguments.rounds
        )
        predictions = predict(contenders, inputs, dtype)
        of_casts = OpTimes(torch.device(device), dtype, ())
        cast_ms = sum(map(of_casts.cast_of_shape, casts[BASELINE])) / 1e6
        share = cast_ms / (steps.median(BASELINE, 1e3) or 1)
        limit = MAX_RATIO if share >= MANY_CASTS else MAX_RATIO_OF_FEW_CASTS
        for each in contenders:
            predicted = predictions.get(each)
            measured = passes.median(each, 1e3) or 0.0
            rows.append(
                {
                    "model": name,
                    "contender": each,
                    "casts": len(casts[each]),
                    "ms a step": steps.median(each, 1e3),
                    f"x {BASELINE}": steps.ratio(each, BASELINE),
                    "+-": steps.spread(each, BASELINE),
                    "ms of passes": measured,
                    "predicted": predicted,
                    "x measured": None if predicted is None else predicted / measured,
                }
            )
        for each in PLANNED:
            measured = passes.median(each, 1e3) or 1
            error = abs(predictions[each] / measured - 1)
            fewer = len(casts[each]) / max(1, len(casts[BASELINE]))
            ratio = steps.ratio(each, BASELINE)
            verdicts.append(
                {
                    "model": name,
                    "contender": each,
                    f"casts, of {BASELINE}'s time": share,
                    "target": limit,
                    "step": ratio,
                    "met": measure.within(ratio, limit),
                    f"casts x {BASELINE}": fewer,
                    f"within {MAX_CASTS}": fewer <= MAX_CASTS,
                    "prediction off by": error,
                    f"within {MAX_ERROR}": error <= MAX_ERROR,
                }
            )
        measure.progress(f"{name}: done")
    notes = (
        f"{measure.in_turn(arguments.rounds)}; {measure.SPREAD}",
        "casts: of a forward pass, by torch's profiler, beyond those in fp32",
        "ms of passes: forward and backward, no update",
        "predicted: mean of what a plan says before the training, and after it",
        *measure.conditions("plan", device, arguments),
    )
    return [
        measure.table("Planned models", rows, notes),
        measure.table("Targets", verdicts, ()),
    ]


def make_contenders(
    name: str, device: str, dtype: torch.dtype
) -> tuple[dict[str, Contender], tuple[Tensor, ...]]:
    """Build the contenders, with the same weights, and a batch."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = WithLoss(model).to(device).train()
    inputs = tuple(each.to(device) for each in inputs)

    def copied() -> tuple[nn.Module, torch.optim.Optimizer]:
        own = copy.deepcopy(model)
        return own, torch.optim.AdamW(own.parameters(), 1e-4)

    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "fp32": nullcontext,
        BASELINE: partial(torch.autocast, device, dtype),
        "lean": partial(autocast, device, dtype, policy="lean"),
    }
    contenders = {n: Contender(*copied(), make) for n, make in contexts.items()}
    for level in ("O1", "O2"):
        own, optimizer = copied()
        eager = prepare(own, optimizer, level, dtype=dtype)
        contenders[level] = Contender(own, optimizer, eager.autocast, session=eager)
    for label, method, level in _PLANS:
        own, optimizer = copied()
        planned = _plan(own, inputs, dtype, method, level)
        session = prepare(own, optimizer, level, dtype=dtype) if level == "O2" else None
        run = rewrite(own, planned)
        contenders[label] = Contender(run, optimizer, plan=planned, session=session)
    return contenders, inputs


_PLANS = [
    (f"{method}{'' if level == 'O1' else f' {level}'}", method, level)
    for level in ("O1", "O2")
    for method in METHODS
]


def _plan(
    model: nn.Module,
    inputs: tuple[Any, ...],
    dtype: torch.dtype,
    method: str,
    level: str,
) -> Plan:
    """Plan a model; the first plan of the series times all ops anew."""
    refresh = (method, level) == _PLANS[0][1:]
    return plan(model, inputs, dtype=dtype, method=method, level=level, refresh=refresh)


def predict(
    contenders: Mapping[str, Contender], inputs: tuple[Any, ...], dtype: torch.dtype
) -> dict[str, float]:
    """Return the predicted milliseconds: mean of the plans before training and now.

    Ops are timed within a second, while the speed of a shared machine changes from
    minute to minute.
    """
    predictions = {}
    for label, method, level in _PLANS:
        before, model = contenders[label].plan, contenders["fp32"].run
        now = _plan(model, inputs, dtype, method, level)
        predictions[label] = (now.ms + (before or now).ms) / 2
    return predictions


def count_copies(
    contender: Contender, inputs: tuple[Any, ...]
) -> Counter[tuple[int, ...]]:
    """Count the dtype conversions of a forward pass, by shape."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    with without_kineto_log(), profiler as profile, contender.make_context():
        contender.run(*inputs)
    return Counter(
        tuple(event.input_shapes[0])
        for event in profile.events() or ()
        if event.name == "aten::_to_copy"
    )


def train_in_turn(
    model: str,
    contenders: dict[str, Contender],
    inputs: tuple[Any, ...],
    device: str,
    rounds: int,
) -> tuple[measure.Times, measure.Times]:
    """Return the times of forward and backward passes, and of whole steps."""
    passes: dict[str, list[float]] = defaultdict(list)
    steps: dict[str, list[float]] = defaultdict(list)
    for number in range(_WARM_UP + rounds):
        for name in measure.order(contenders, number):
            call = partial(contenders[name].forward_backward, inputs)
            loss, forward_backward = measure.timed(call, device)
            _, update = measure.timed(contenders[name].update, device)
            if number >= _WARM_UP:
                passes[name].append(forward_backward)
                steps[name].append(forward_backward + update)
                what = f"{model}: {name}"
                journal.record(what, seconds=steps[name][-1], loss=loss.item())
    return measure.Times(passes), measure.Times(steps)


def count_autocast_casts(model: nn.Module, inputs: tuple[Any, ...], dtype: str) -> int:
    """Return the number of tensors that torch.autocast casts in a forward pass."""
    own = _copied(model)  # a forward pass may change buffers
    fp32, autocasted = Contender(own), _under_autocast(own, inputs, dtype)
    return (count_copies(autocasted, inputs) - count_copies(fp32, inputs)).total()


def measure_plan(
    model: nn.Module, inputs: tuple[Any, ...], chosen: Plan, rounds: int = 9
) -> dict[str, float]:
    """Return milliseconds of the passes as planned, under torch.autocast, and in fp32.

    Args:
        model: The planned model; its gradients, buffers and dtypes change.
        inputs: One batch.
        chosen: The plan.
        rounds: Turns of each contender.
    """
    fp32_model = _copied(model)
    for name in chosen.low_weights:
        param = model.get_parameter(name)
        param.data = param.data.to(formats.parse(chosen.dtype).dtype)
    contenders = {
        "this plan": Contender(rewrite(model, chosen)),
        BASELINE: _under_autocast(fp32_model, inputs, chosen.dtype),
        "fp32": Contender(fp32_model),
    }
    device = device_of(model, inputs).type
    passes, _ = train_in_turn("plan", contenders, inputs, device, rounds)
    return {name: passes.median(name, 1e3) or 0.0 for name in contenders}


def _copied(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        # Raised inside torch, for saved programs.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        return copy.deepcopy(model)


def _under_autocast(model: nn.Module, inputs: tuple[Any, ...], dtype: str) -> Contender:
    device, low = device_of(model, inputs).type, formats.parse(dtype).dtype
    return Contender(model, make_context=partial(torch.autocast, device, low))
