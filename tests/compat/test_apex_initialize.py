"""`amp.initialize`: containers, keyword arguments, levels, and what it refuses."""

import copy
import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from apex_programs.process import LEVELS
from torch import nn

from halfstep import UserError
from halfstep.compat.apex import amp
from halfstep.compat.apex.state import STATE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.batch = nn.BatchNorm2d(2)
        self.layer = nn.LayerNorm(4)
        self.register_buffer("places", torch.arange(3))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.batch(self.conv(x))) * self.table


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)


def start(level: str = "O2", **kwargs: Any) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    kwargs = {"opt_level": level, "verbosity": 0} | kwargs
    return amp.initialize(net, sgd(net), **kwargs)


@pytest.mark.parametrize("many_models", [None, list, tuple])
@pytest.mark.parametrize("many_optimizers", [None, list, tuple])
def test_containers_come_back(many_models: Any, many_optimizers: Any) -> None:
    """Law: what was one is one, a list a list, a tuple a tuple, the same objects."""
    nets = [Net(), Net()][: 2 if many_models else 1]
    steppers = [sgd(net) for net in nets][: 2 if many_optimizers else 1]
    models, optimizers = amp.initialize(
        many_models(nets) if many_models else nets[0],
        many_optimizers(steppers) if many_optimizers else steppers[0],
        verbosity=0,
    )
    assert type(models) is (many_models or Net)
    assert type(optimizers) is (many_optimizers or torch.optim.SGD)
    assert (list(models) if many_models else [models]) == nets
    assert (list(optimizers) if many_optimizers else [optimizers]) == steppers


@pytest.mark.parametrize("enabled", [True, False])
def test_models_alone(enabled: bool) -> None:
    """Law: without optimizers, models alone come back; disabled, all is plain fp32."""
    net = Net()
    assert amp.initialize(net, enabled=enabled, opt_level="O2", verbosity=0) is net
    nets = [Net(), Net()]
    assert amp.initialize(nets, None, enabled=enabled, verbosity=0) is nets
    if not enabled:
        net, optimizer = start(enabled=False)
        loss = net(torch.ones(1, 1, 6, 6)).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled is loss
        assert {p.dtype for p in net.parameters()} == {torch.float32}
        assert amp.state_dict() == {}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_of_weights_and_outputs(level: str, dtype: torch.dtype) -> None:
    """Law: O2 halves all but batch norm, O3 that too; integers stay; fp32 goes out."""
    halved = level in {"O2", "O3"}
    net, optimizer = start(level, **({"cast_model_type": dtype} if halved else {}))
    low = dtype if halved else torch.float32
    norm = dtype if level == "O3" else torch.float32
    assert net.conv.weight.dtype == net.layer.weight.dtype == net.table.dtype == low
    assert net.batch.weight.dtype == net.batch.running_mean.dtype == norm
    assert net.places.dtype == torch.int64
    inputs = torch.ones(2, 1, 6, 6, dtype=torch.float64 if halved else torch.float32)
    assert net(inputs).dtype == torch.float32
    masters = {p.dtype for p in amp.master_params(optimizer)}
    assert masters == ({dtype} if level == "O3" else {torch.float32})
    assert {v.dtype for v in net.state_dict().values() if v.is_floating_point()} == {
        torch.float32
    }


@pytest.mark.parametrize(
    ("given", "kept"), [("True", True), ("False", False), (True, True), (False, False)]
)
def test_keep_batchnorm(given: Any, kept: bool) -> None:
    """Law: keep_batchnorm_fp32 takes booleans and their names."""
    net, _ = start("O3", keep_batchnorm_fp32=given)
    assert net.batch.weight.dtype == (torch.float32 if kept else torch.float16)


@pytest.mark.parametrize("given", [128.0, "128.0", 128])
@pytest.mark.parametrize("level", LEVELS)
def test_static_scale(level: str, given: Any) -> None:
    """Law: a scale may be a number or its name, at each level."""
    net, optimizer = start(level, loss_scale=given)
    loss = net(torch.ones(2, 1, 6, 6)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype == torch.float32
        torch.testing.assert_close(scaled, loss.float() * 128, rtol=0, atol=0)
        scaled.backward()
    assert not STATE.loss_scalers[0].dynamic


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_outputs(level: str, dtype: torch.dtype) -> None:
    """Law: cast_model_outputs says what goes out, at each level."""
    net, _ = start(level, cast_model_outputs=dtype)
    assert net(torch.ones(2, 1, 6, 6)).dtype == dtype


Pair = namedtuple("Pair", "one other")  # noqa: PYI024 -- an untyped one, on purpose


class Mirror(nn.Module):
    seen: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        return args


def test_nested_values_are_cast() -> None:
    """Law: tensors come in 16 bits and go out in fp32, however they are nested."""
    model = amp.initialize(Mirror(), opt_level="O2", verbosity=0)
    x, count = torch.ones(2), torch.ones(2, dtype=torch.int64)
    out = model([x, (x, "word")], Pair(x, count), 1, named={"key": x.double()})
    (pairs, pair, number), named = model.seen
    half = [pairs[0], pairs[1][0], pair.one, named["named"]["key"]]
    assert {t.dtype for t in half} == {torch.float16}
    assert (pairs[1][1], number, pair.other.dtype) == ("word", 1, torch.int64)
    assert type(pair) is Pair
    assert out[0][1][0].dtype == out[1].one.dtype == torch.float32


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "level": ({"opt_level": "02"}, "opt_level='02' is not a level"),
    "number": ({"opt_level": 1}, "opt_level=1 is not a level"),
    "O1 cast": ({"opt_level": "O1", "cast_model_type": torch.half}, "torch.float16"),
    "O1 norm": ({"opt_level": "O1", "keep_batchnorm_fp32": "True"}, "keep.*=True"),
    "O1 masters": ({"opt_level": "O1", "master_weights": True}, "master_weights=True"),
    "patch": ({"patch_torch_functions": True}, "patch_torch_functions=True"),
    "scale": ({"loss_scale": "big"}, "loss_scale='big' must be 'dynamic' or a"),
    "no scale": ({"loss_scale": -1}, "loss_scale=-1 must be"),
    "norm": ({"keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32='yes' must be"),
    "type": ({"cast_model_type": torch.int8}, "cast_model_type=torch.int8 must be"),
    "word": ({"cast_model_type": "half"}, "cast_model_type='half' must be"),
    "bounds": ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "max_scale=4.0 must"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """Law: what makes no sense is named, with what would be right, and does nothing."""
    kwargs, text = REFUSED[case]
    with pytest.raises(UserError, match=text) as caught:
        start(**kwargs)
    assert len(str(caught.value).split()) <= 35
    assert STATE.opt_properties is None


@pytest.mark.parametrize("kind", ["param", "buffer"])
def test_half_model_is_refused(kind: str) -> None:
    """Law: a model in 16 bits is refused, unless that is allowed."""
    net = Net()
    if kind == "param":
        net.conv.half()
    else:
        net.table = net.table.half()
    name = "conv.weight" if kind == "param" else "table"
    with pytest.raises(amp.AmpError, match=f"found {kind} {name} with dtype"):
        amp.initialize(net, sgd(net), verbosity=0)
    STATE.allow_incoming_model_not_fp32 = True
    amp.initialize(net, sgd(net), verbosity=0)


def test_called_twice() -> None:
    """Law: a second call replaces level, scalers and casts; masters stay at work."""
    net, optimizer = start("O2")
    first = STATE.loss_scalers
    start("O1", num_losses=2)
    assert torch.is_autocast_enabled("cpu")
    assert len(STATE.loss_scalers) == 2
    assert STATE.loss_scalers is not first
    start("O0")
    assert not torch.is_autocast_enabled("cpu")
    with amp.scale_loss(net(torch.ones(2, 1, 6, 6)).sum(), optimizer) as scaled:
        scaled.backward()
    before = net.layer.bias.detach().clone()
    optimizer.step()
    assert not torch.equal(net.layer.bias, before)


@pytest.mark.parametrize("number", ["2", 0, True])
def test_number_of_losses(number: Any) -> None:
    """Law: num_losses is a whole number of at least 1, or refused at once."""
    with pytest.raises(UserError, match=f"^num_losses={number!r} must be a whole"):
        start("O1", num_losses=number)


def test_not_initialised() -> None:
    """Law: scale_loss says what is missing: initialize, an optimizer, a loss."""
    loss = Net()(torch.ones(2, 1, 6, 6)).sum()

    def refused(optimizer: Any, text: str, **more: Any) -> None:
        with (
            pytest.raises(amp.AmpError, match=text),
            amp.scale_loss(loss, optimizer, **more),
        ):
            pass

    refused(sgd(Net()), "was called before amp")
    _, optimizer = start("O1", num_losses=2)
    refused(sgd(Net()), "SGD did not come from amp")
    refused(optimizer, "loss_id=2 must be below num_losses=2", loss_id=2)


@pytest.mark.parametrize("level", LEVELS)
def test_copies_and_pickles(level: str) -> None:
    """Law: a prepared model can be copied and pickled; a copy is one of its own."""
    net, _ = start(level)
    x = torch.randn(2, 1, 6, 6)
    net(x)  # the copies must not move these statistics
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):  # noqa: S301
        with torch.no_grad():
            twin.conv.bias.add_(64)
        net.eval()
        twin.eval()
        assert not torch.equal(twin(x), net(x))
        assert twin(x).dtype == net(x).dtype
        assert twin.state_dict()["conv.bias"].dtype == torch.float32
        assert not torch.equal(twin.state_dict()["conv.bias"], net.conv.bias)


def test_verbosity(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: verbosity 1 prints the level in apex's words; 0 nothing."""
    start("O3", verbosity=1)
    assert capsys.readouterr().out == "Selected optimization level O3\n"
    start("O3", verbosity=0)
    assert capsys.readouterr().out == ""


def prepared_before() -> tuple[nn.Module, torch.optim.Optimizer]:
    return Net(), start("O1")[1]


GIVEN: dict[str, tuple[type[Exception], Any]] = {
    "models: int is no Module": (TypeError, lambda: (3, None)),
    "models: str is no Module": (TypeError, lambda: ([Net(), "net"], None)),
    "optimizers: int is no Optimizer": (TypeError, lambda: (Net(), 3)),
    "optimizers: dict is no Optimizer": (TypeError, lambda: (Net(), {"a": 1})),
    "already in DataParallel": (
        *(amp.AmpError, lambda: (net := nn.DataParallel(Net()), sgd(net))),
    ),
    "went through amp": (amp.AmpError, prepared_before),
}


@pytest.mark.parametrize("text", GIVEN)
def test_what_is_given_is_refused(text: str) -> None:
    """Law: what is no model or optimizer is a TypeError, as in apex; wrappers are ours.

    An optimizer passes through once.
    """
    kind, make = GIVEN[text]
    models, optimizers = make()
    with pytest.raises(kind, match=text):
        amp.initialize(models, optimizers, opt_level="O1", verbosity=0)
