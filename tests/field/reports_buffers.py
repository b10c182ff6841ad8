"""Buffers: statistics that an overflow spoils, constants that 16 bits do not hold."""

import torch
from tests.field.nets import WIDTH, distance, is_nonfinite, loop, mean_square
from tests.field.report import Amp, Program, report
from torch import Tensor, nn


@report(
    says=r"running_(mean|var).* since step 2.*reset_running_stats\(\)",
    truth="running_(mean|var)",
)
def statistics_after_overflow(amp: Amp, *, cured: bool) -> Program:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = amp.scaler(init_scale=1024.0)
    x, sizes = torch.randn(16, WIDTH), iter([1.0, 1e6] + 98 * [1.0])

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            with torch.autocast("cpu", dtype=torch.float16, enabled=not cured):
                y = model[0](x * next(sizes))
            loss = (model[1](y).float() - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def is_sick() -> bool:
        with torch.no_grad():
            return not bool(model.eval()(x).isfinite().all())

    return Program(model, step, is_sick)


@report(says=r"running_var.*(float16|fp16).*65504", truth="running_var")
def statistics_in_half(amp: Amp, *, cured: bool) -> Program:
    del amp
    norm, head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1).half()
    model = nn.Sequential(norm if cured else norm.half(), head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    x = (1000 * torch.randn(16, WIDTH)).half()

    is_sick = is_nonfinite(norm.running_var)
    return loop(None, model, lambda: distance(model(x)), optimizer, is_sick=is_sick)


@report(says=r"softmax\): zero: a mask covers a whole row", truth="(?i)softmax|mask")
def mask_in_half(amp: Amp, *, cured: bool) -> Program:
    del amp

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
            mask[3] = torch.finfo(torch.float32).min
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            mask = self.mask.clamp(min=-6e4) if cured else self.mask
            return (y @ y.T + mask).softmax(-1) @ y

    model = Attention().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, WIDTH).half()

    is_sick = is_nonfinite(model.layer.weight)
    return loop(None, model, lambda: mean_square(model(x)), optimizer, is_sick=is_sick)


@report(says=r"rope \(Rope\): .*module:rope=fp32", truth=r"rope(?!\.layer)")
def positions_in_bf16(amp: Amp, *, cured: bool) -> Program:
    del amp

    class Rope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positions", torch.arange(600.0))

        def forward(self, x: Tensor) -> Tensor:
            angles = self.positions[:, None] / torch.arange(1.0, 1 + WIDTH)
            return x * angles.cos().to(x.dtype)

    model, x = nn.Sequential(), torch.randn(4, 600, WIDTH)
    model.add_module("layer", nn.Linear(WIDTH, WIDTH))
    model.add_module("rope", Rope())

    def step() -> None:
        model.bfloat16()
        if cured:
            model.rope.positions = torch.arange(600.0)

    def is_sick() -> bool:
        return len(model.rope.positions.unique()) < 600

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch).float() - batch).square().mean()

    check = {"loss_fn": loss_fn, "batch": x, "level": "O3", "dtype": "bf16"}
    policy = "lean + module:rope=fp32" if cured else None
    return Program(model, step, is_sick, check={**check, "policy": policy, "steps": 0})
