"""`halfstep run` trains an unedited script as its hand-written AMP version trains.

The version written by hand runs here: lines marked `# low` in an autocast context,
losses scaled, steps taken by a scaler. The program as it stands has its own process.
"""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_forked, run_ranks

import halfstep as hs

BEGIN = """
import sys, torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
def net(*sizes):
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]
    return nn.Sequential(layers[0], nn.LayerNorm(sizes[1]), nn.ReLU(), *layers[1:])
model = net(16, 32, 4)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
"""

PROGRAMS = {
    "a typical loop, evaluation, clipping": """
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        for epoch in range(4):
            loss = F.cross_entropy(model(x), y)  # low
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            with torch.no_grad():
                right = (model(x).argmax(-1) == y).float().mean()  # low
            print(loss.item(), norm.item(), right.item())
    """,
    "accumulation": """
        for window in range(3):
            for part in range(2):
                loss = F.mse_loss(model(x)[:, part], y / 4)  # low
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())
    """,
    "two optimizers": """
        judge = net(4, 8, 1)
        judging = torch.optim.AdamW(judge.parameters(), 0.01)
        bce = nn.BCEWithLogitsLoss()
        one, zero = torch.ones(64, 1), torch.zeros(64, 1)
        for step in range(3):
            fake = model(x)  # low
            judging.zero_grad()
            real = bce(judge(x[:, :4]), one)  # low
            loss = real + bce(judge(fake.detach()), zero)  # low
            loss.backward()
            judging.step()
            optimizer.zero_grad()
            cheat = bce(judge(fake), one)  # low
            cheat.backward()
            optimizer.step()
            print(loss.item(), cheat.item())
    """,
    "a closure": """
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)  # low
            loss.backward()
            return loss
        for step in range(3):
            loss = optimizer.step(closure)
            print(loss.item())
    """,
    "a gradient penalty": """
        for step in range(3):
            point = x.clone().requires_grad_()
            score = model(point).float().sum()  # low
            slope, = torch.autograd.grad(score, point, create_graph=True)
            size = model(x).float().square().mean()  # low
            loss = (slope.norm(dim=-1) - 1).square().mean() + size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
    """,
    "activation checkpoints": """
        from torch.utils.checkpoint import checkpoint
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = nn.Linear(16, 32), net(32, 32, 32)
                self.three = nn.Linear(32, 4)
            def forward(self, x):
                x = checkpoint(self.two, self.one(x), use_reentrant=False)
                return self.three(checkpoint(self.two, x, use_reentrant=True))
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            loss = F.cross_entropy(model(x), y)  # low
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
    """,
    "torch.compile": """
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(3):
            loss = F.cross_entropy(compiled(x), y)  # low
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        breaks = torch._dynamo.utils.counters["graph_break"]
        assert not breaks, breaks
    """,
}


SCRIPT = ("script.py",)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Write a program into a folder and run it by Python with some flags."""

    def run(
        text: str,
        *flags: str,
        words: Any = (),
        script: Any = SCRIPT,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(text)
        return subprocess.run(
            [sys.executable, *flags, *script, *words],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Any]:
    """Run a program with HALFSTEP set to each of some words, or not at all."""

    def run(text: str, *dtypes: str, words: tuple[str, ...] = ()) -> Any:
        (tmp_path / "script.py").write_text(text)
        ended = run_forked(
            str(tmp_path / "script.py"),
            *words,
            environments=[{"HALFSTEP": dtype} for dtype in dtypes],
        )
        return ended if len(ended) > 1 else ended[0]

    return run


RUN = ("-m", "halfstep", "run")
BY_HAND = {
    r"(?m)^( *)(.*)  # low$": r"\1with autocast(): \2",
    r"(\w+)\.backward\(\)": r"scaler.scale(\1).backward()",
    r"(norm = nn\.utils)": r"scaler.unscale_(optimizer); \1",
    r"judging\.step\(\)": r"scaler.step(judging)",
    r"optimizer\.step\((\w*)\)": r"scaler.step(optimizer, \1); scaler.update()",
}
"""Pattern of a plain program -> what people write for AMP."""


def by_hand(program: str, dtype: torch.dtype) -> str:
    for pattern, replacement in BY_HAND.items():
        program = re.sub(pattern, replacement, program)
    scaler = hs.GradScaler("cpu", enabled=dtype == torch.float16)
    names: dict[str, Any] = {
        "autocast": lambda: hs.autocast("cpu", dtype, policy="lean"),
        "scaler": scaler,
    }
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "by hand", "exec"), names)  # noqa: S102
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "fp16") for name in PROGRAMS),
        ("a typical loop, evaluation, clipping", "bf16"),
        ("two optimizers", "bf16"),
    ],
)
def test_losses_are_those_of_amp_by_hand(trained: Any, name: str, dtype: str) -> None:
    """Law: losses, norms and scores are equal to the bit."""
    program = BEGIN + textwrap.dedent(PROGRAMS[name])
    done = trained(program, dtype)
    assert done.returncode == 0, done.stderr
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float16
    assert done.stdout == by_hand(program, torch_dtype)
    assert f"halfstep: O1 {dtype}: " in done.stderr.splitlines()[-1]


STEPS = f"""{BEGIN}
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
weight = model[0].weight
for bad in map(int, sys.argv[1]):
    before = weight.detach().clone()
    loss = F.cross_entropy(model(x), y) * (torch.inf if bad else 1)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(bool((weight != before).any()), schedule.last_epoch)
"""


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_skipped_steps(trained: Any, dtype: str) -> None:
    """Law: inf skips the step, also where clipping hides it, and holds the schedule."""
    program = STEPS if dtype == "fp16" else re.sub(r" +nn.utils.*", "", STEPS)
    done = trained(program, dtype, words=("0110",))
    assert done.stdout.splitlines() == ["True 1", "False 1", "False 1", "True 2"]
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith(f"halfstep: O1 {dtype}: 4 optimizer steps, 2 skipped;")


def test_collapse_names_the_data(trained: Any) -> None:
    """Law: NaN in the input of a model of one layer is not the loss function's."""
    program = STEPS.replace("model(x)", "model[0](x * torch.nan)")
    done = trained(program, "fp16", words=("0" * 20,))
    assert re.search(r"Collapse: .* data \(the input of linear \(group", done.stderr)


def test_float64_weights(trained: Any) -> None:
    """Law: the last line says that none of them was cast."""
    program = STEPS.replace("model(x)", "model.double()(x.double())")
    done = trained(program, "bf16", words=("0",))
    text = "the weights are float64, which no level casts: 1 optimizer steps, 0 skipped"
    assert done.stderr.splitlines()[-1].startswith(f"halfstep: {text}; forward")


ODD = {
    "arguments of a step": """
        class Optimizer(torch.optim.SGD):
            def step(self, factor=None, closure=None):
                assert factor in (None, 2)
                return super().step(closure)
        optimizer = Optimizer(model.parameters(), 0.1)
        model(x).square().mean().backward()
        optimizer.step(None)
        optimizer.step(2)
    """,
    "steps that a script skips": """
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        taken = 0
        for step in range(20):
            loss = model(x).square().sum() * 1e3
            optimizer.zero_grad()
            loss.backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
                taken += 1
        assert taken > 3, taken
    """,
    "heads used in turn": """
        heads = net(4, 4, 1), net(4, 4, 1)
        params = [p for part in (model, *heads) for p in part.parameters()]
        optimizer = torch.optim.SGD(params, 1e-3)
        for step in range(8):
            before = heads[1][0].weight.detach().clone()
            loss = heads[step > 1](model(x)).square().mean() * 1e-2
            optimizer.zero_grad()
            with warnings.catch_warnings(action="ignore"):
                (loss * (torch.inf if step == 1 else 1)).backward()
            optimizer.step()
            assert step < 2 or (heads[1][0].weight != before).any(), step
    """,
    "threads that share a model": """
        from threading import Thread
        def train(rows):
            for step in range(40):
                model(rows).square().mean().backward()
        def run(parallel):
            model.zero_grad()
            threads = [Thread(target=train, args=(rows,)) for rows in x.split(16)]
            for thread in threads:
                thread.start()
                if not parallel:
                    thread.join()
            for thread in threads:
                thread.join()
            return model[0].weight.grad
        torch.testing.assert_close(run(True), run(False), rtol=1e-4, atol=1e-5)
    """,
    "threads that begin at once": """
        from threading import Barrier, Thread
        together = Barrier(4)
        def train():
            together.wait()
            model(x).square().mean().backward()
        threads = [Thread(target=train) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    """,
    "a loss that is a parameter": """
        model(x)
        weight = nn.Parameter(torch.tensor(2.0))
        weight.backward()
        assert weight.grad == 1
    """,
    "hooks on a parameter": """
        seen, weight = [], model[0].weight
        weight.register_hook(lambda grad: seen.append(grad.norm()))
        weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        model(x).square().mean().backward()
        assert seen[0] < 10 and weight.grad.abs().max() == torch.tensor(1e-3)
    """,
    "weights computed from others": """
        layer = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
        error = (layer.weight @ layer.weight.T - torch.eye(16)).abs().max()
        assert error < 1e-5, error
    """,
    "a traced model": """
        traced = torch.jit.trace(model.eval(), x)
        assert "aten::to" not in str(traced.inlined_graph)
    """,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_programs(trained: Any, name: str) -> None:
    """Law: their assertions, which hold in fp32, hold in fp16."""
    program = "import warnings" + BEGIN + textwrap.dedent(ODD[name])
    plain, ours = trained(program, "", "fp16")
    assert plain.returncode == ours.returncode == 0, plain.stderr + ours.stderr
    assert ours.stderr.count("this cpu runs fp16") <= 1


def test_the_script_is_itself(launch: Any) -> None:
    """Law: arguments, name, path, flags, traceback, exit status are as without us."""
    program = """
import sys, torch
flags = sys.flags
print(flags.optimize, sys.stdout.write_through, flags.int_max_str_digits)
if __name__ == "__main__":
    print(sys.argv, __file__, sys.path[0], "halfstep.session" in sys.modules)
    raise ValueError("mine")
"""
    words = ("--level", "fail")
    plain, ours = (
        launch(program, "-Ou", "-X", "int_max_str_digits=900", *flags, words=words)
        for flags in ((), RUN)
    )
    assert plain.returncode == ours.returncode == 1
    assert plain.stdout == ours.stdout
    idle = "halfstep: this process called no module: nothing ran in 16 bits.\n"
    assert ours.stderr == plain.stderr + idle
    assert "site-packages" not in plain.stdout


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "roots", ["(each for each in [loss])", "get_gradient_edge(loss), torch.ones(())"]
)
def test_roots_of_other_kinds(trained: Any, roots: str, dtype: str) -> None:
    """Law: whatever a backward pass begins from, gradients are those of the loss."""
    program = BEGIN + textwrap.dedent("""
        from torch.autograd.graph import get_gradient_edge
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        torch.autograd.backward(ROOTS)
        print(all(p.grad.allclose(g) for p, g in zip(model.parameters(), grads)))
    """)
    done = trained(program.replace("ROOTS", roots), dtype)
    assert done.stdout == "True\n", done.stderr


def test_a_forked_process_says_nothing(trained: Any) -> None:
    """Law: the line at the end is the script's, however many processes it forks."""
    program = BEGIN + "import os\nmodel(x)\nif os.fork() == 0: sys.exit()\nos.wait()"
    done = trained(program, "BF16 ")
    assert done.stderr.count("O1 bf16") == 1


UPDATES = {
    "in place": """
        loss_of(model(x)).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
                param.grad.zero_()
    """,
    "data": """
        model.zero_grad()
        loss_of(model(x)).backward()
        for param in model.parameters():
            param.data = param.data - 0.1 * param.grad
    """,
    "autograd.grad": """
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss_of(model(x)), params)):
            param.data.sub_(0.1 * grad)
    """,
    "torch.func": """
        params = {name: p.detach() for name, p in model.named_parameters()}
        def loss(params):
            return loss_of(torch.func.functional_call(model, params, (x,)))
        for name, grad in torch.func.grad(loss)(params).items():
            params[name] -= 0.1 * grad
    """,
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("update", UPDATES)
def test_updates_by_hand(trained: Any, update: str, dtype: str) -> None:
    """Law: a line says that no optimizer stepped weights, and inf reaches none.

    The first loss scale overflows; it decreases, and the weights train as in fp32.
    """
    program = BEGIN.replace("\noptimizer", "\n#") + textwrap.dedent("""
        start = F.mse_loss(model(x)[:, 0], y / 4).item()
        def loss_of(output):
            return F.mse_loss(output[:, 0], y / 4) * 30
        for step in range(60):
    """)
    program += textwrap.indent(textwrap.dedent(UPDATES[update]), "    ")
    program += "print(start, F.mse_loss(model(x)[:, 0], y / 4).item())"
    plain, ours = trained(program.replace("0.1", "0.003"), "", dtype)
    assert plain.returncode == ours.returncode == 0, plain.stderr + ours.stderr
    before, after = map(float, ours.stdout.split())
    assert after == pytest.approx(float(plain.stdout.split()[1]), rel=0.1)
    assert after < before / 3
    *lines, note, _ = ours.stderr.splitlines()
    assert note.startswith("halfstep: weights got gradients, and no optimizer stepped")
    assert ("run in bf16" in note) == (dtype == "fp16")
    is_functional = update in ("autograd.grad", "torch.func")
    assert ("scale no loss" in note) == (dtype == "fp16" and is_functional)
    has_overflow = dtype == "fp16" and update in ("in place", "data")
    assert sum("they are 0 in `.grad`" in line for line in lines) == has_overflow


BESIDE_AN_OPTIMIZER = {
    "a second model by hand": """
        other = nn.Linear(16, 1)
        for step in range(12):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            other.zero_grad()
            (other(x) * 300).square().mean().backward()
            assert all(p.grad.isfinite().all() for p in other.parameters())
    """,
    "an optimizer that is not used": "F.cross_entropy(model(x), y).backward()",
    "a part of the weights": """
        optimizer = torch.optim.AdamW(model[-1].parameters(), 0.01)
        for step in range(12):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * 100).backward()
            optimizer.step()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    """,
    "input gradients": """
        model.requires_grad_(False)
        x.requires_grad_(True)
        torch.autograd.grad(model(x).sum(), x)
        model(x).square().sum().backward()
        assert x.grad.count_nonzero()
    """,
    "a pass before the optimizer": """
        del optimizer
        F.cross_entropy(model(x), y).backward()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        optimizer.step()
    """,
}


@pytest.mark.parametrize("program", BESIDE_AN_OPTIMIZER)
def test_weights_outside_optimizers(trained: Any, program: str) -> None:
    """Law: their overflow leaves zeros and a line; others' gradients have no line."""
    done = trained(BEGIN + textwrap.dedent(BESIDE_AN_OPTIMIZER[program]), "fp16")
    assert done.returncode == 0, done.stderr
    lines = [text for text in done.stderr.splitlines() if text.startswith("halfstep: ")]
    overflows = program in ("a second model by hand", "a part of the weights")
    assert ("they are 0 in `.grad`" in lines[0]) == overflows
    has_note = program in ("a second model by hand", "an optimizer that is not used")
    assert ("no optimizer stepped them" in done.stderr) == has_note
    assert len(lines) == 1 + overflows + has_note


def test_a_module_of_a_package(launch: Any, tmp_path: Path) -> None:
    """Law: `run -m a.b` imports a once, and trains b; at O0 nothing is reported."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__init__.py").write_text("print('imported')")
    (tmp_path / "a" / "b.py").write_text(STEPS)
    done, o0 = (
        launch("", *RUN, *flags, "-m", "a.b", "0", script=(), HALFSTEP="fp16")
        for flags in ((), ("--level", "O0"))
    )
    assert done.stdout == o0.stdout == "imported\nTrue 1\n"
    assert "O1 bf16: 1 optimizer steps" in done.stderr
    assert o0.stderr == ""


@pytest.mark.parametrize("closing", ["sys.stderr.close()", "sys.stderr = None"])
def test_a_closed_error_stream(trained: Any, closing: str) -> None:
    """Law: a line that cannot be written ends nothing."""
    done = trained(BEGIN + closing + "\nmodel(x); sys.exit(3)", "bf16")
    assert done.returncode == 3


OWN = {
    "with torch.autocast('cpu'): model(x)": "it opens autocast contexts",
    "model.forward = torch.autocast('cpu')(model.forward); model(x)": "it opens "
    "autocast contexts",
    "torch.amp.GradScaler('cpu')": "it makes a GradScaler",
    "model.bfloat16()(x.bfloat16())": "its model has 16-bit weights",
}


@pytest.mark.parametrize("line", OWN)
def test_scripts_with_amp_are_left_alone(trained: Any, line: str) -> None:
    """Law: one notice, and results as without us."""
    reason = OWN[line]
    program = f"{BEGIN}{line}\nprint(model(x.to(model[0].weight.dtype)).sum())"
    plain, ours = trained(program, "", "bf16")
    assert ours.stdout == plain.stdout
    assert ours.stderr == (
        f"halfstep: the script has mixed precision of its own ({reason}): left alone.\n"
    )


def test_what_is_not_training(trained: Any) -> None:
    """Law: metrics compute as before, weights and checkpoints are fp32."""
    program = (
        BEGIN
        + """
class Metric(nn.Module):
    def forward(self, a, b):
        return a @ b
with torch.no_grad():
    assert Metric()(x, x.T).equal(x @ x.T)
out = model(x)
assert out.dtype == torch.float32
with torch.no_grad():
    hidden = torch.relu(model[1](F.linear(x, model[0].weight, model[0].bias)))
    assert not out.equal(F.linear(hidden, model[3].weight, model[3].bias))
out.sum().backward()
optimizer.step()
state = [each for of in optimizer.state.values() for each in of.values()]
tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), *state]
assert {t.dtype for t in tensors} == {torch.float32}
"""
    )
    done = trained(program, "bf16")
    assert done.returncode == 0, done.stderr


RANKS = f"""{BEGIN}
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
for step in range(3):
    bad = step == 1 and dist.get_rank() == 1
    loss = F.cross_entropy(model(x + dist.get_rank()), y) * (torch.inf if bad else 1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
total = sum(p.sum() for p in model.parameters()).detach()
totals = [torch.zeros(()) for _ in range(2)]
dist.all_gather(totals, total)
assert totals[0] == totals[1] and total.isfinite()
dist.destroy_process_group()
"""


def test_ranks_skip_together(launch: Any) -> None:
    """Law: under torchrun an overflow on one rank skips the step of both."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = launch(RANKS, *torchrun, HALFSTEP="fp16")
    assert done.returncode == 0, done.stderr
    (line,) = [each for each in done.stderr.splitlines() if "optimizer steps" in each]
    assert "O1 fp16: 3 optimizer steps, 1 skipped" in line


SHARDED = f"""{BEGIN}
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("gloo")
model = FullyShardedDataParallel(
    nn.Linear(8, 8), device_id=torch.device("cpu"), use_orig_params=sys.argv[1] == "1"
)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    factor = torch.ones(8)
    factor[7] = torch.inf if step == 1 else 1  # in one shard
    (model(x[:, :8]) * factor).sum().mul(1e-3).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    pairs = zip(model.parameters(), before)
    moved = torch.tensor(float(any((p != q).any() for p, q in pairs)))
    assert moved == (step != 1)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("use_orig_params", ["0", "1"])
def test_shards_skip_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use_orig_params: str
) -> None:
    """Law: under FSDP1 too, where the inf lies in the shard of one rank."""
    (tmp_path / "script.py").write_text(SHARDED)
    monkeypatch.setenv("HALFSTEP", "bf16")
    run_ranks(str(tmp_path / "script.py"), use_orig_params)


SPAWNED = """
import os, torch
from torch import nn
import torch.distributed as dist
def train(rank, folder):
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    dist.destroy_process_group()
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (os.getcwd(),), 2)
"""


def test_spawned_ranks(launch: Any) -> None:
    """Law: one process of a spawned group reports."""
    done = launch(SPAWNED, HALFSTEP="bf16")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("1 optimizer steps, 0 skipped") == 1


REFUSED = {
    (*RUN, "other.py"): "there is no script other.py.",
    (*RUN, "-m", "no.such"): "there is no module named no.such.",
    (*RUN, "--dtype", "fp8", "script.py"): "--dtype fp8 must be bf16, fp16 or auto.",
    (*RUN, "--level", "o1", "script.py"): "--level o1 must be auto, O0 or O1.",
    (*RUN,): "no script was given: halfstep run script.py, or run -m module.",
    (*RUN, "--level", "O2", "script.py"): "--level O2 stores weights in 16 bits, for "
    "which the script must call halfstep.prepare; a script that is not edited runs at "
    "O1, O0 or auto.",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(launch: Any, words: tuple[str, ...]) -> None:
    """Law: what cannot be done ends in one line and status 2."""
    done = launch("import torch", *words, script=())
    assert done.returncode == 2
    assert done.stderr == f"halfstep: error: {REFUSED[words]}\n"


UNKNOWN = (
    "halfstep: HALFSTEP={!r} has no effect: set bf16, fp16 or auto, or 0 for off.\n"
)


@pytest.mark.parametrize("value", ["1", "banana\n"])
def test_unknown_values_change_nothing(launch: Any, value: str) -> None:
    """Law: a program that imports torch runs as without the variable, after a line."""
    program = BEGIN + "model(x).sum().backward(); optimizer.step(); print(model(x))"
    plain, ours = (launch(program, HALFSTEP=each) for each in ("", value))
    assert (ours.returncode, ours.stdout) == (0, plain.stdout)
    assert ours.stderr == plain.stderr + UNKNOWN.format(value)


@pytest.mark.parametrize("value", [" ", "False"])
def test_off(trained: Any, value: str) -> None:
    """Law: words for off, and spaces, are as no variable."""
    assert trained(BEGIN + "model(x)", value).stderr == ""


@pytest.mark.parametrize(
    "breaking",
    [
        'sys.modules["halfstep._torch.optimizer_params"] = None',
        # As a later torch might.
        "import torch.amp as amp; del amp.grad_scaler.GradScaler.__init__",
    ],
)
def test_a_broken_installation_does_not_break_torch(launch: Any, breaking: str) -> None:
    """Law: torch is imported as it is, and a line has the error."""
    program = f"""
import importlib.metadata, sys
entry_points = importlib.metadata.entry_points
def broken(**selected):
    {breaking}
    return entry_points(**selected)
importlib.metadata.entry_points = broken
import torch
assert torch.nn.Module.__call__.__module__ == "torch.nn.modules.module"
"""
    done = launch(program, HALFSTEP="bf16")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.match(r"halfstep: HALFSTEP='bf16' has no effect: [A-Z]\w+Error: .", line)


def test_signals_reach_the_script(tmp_path: Path) -> None:
    """Law: the process is the script's: its own handlers run."""
    (tmp_path / "script.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, *RUN, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 5
