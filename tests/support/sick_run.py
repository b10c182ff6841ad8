"""Folders of runs as a trainer and a probe leave them, sick or sound, without either.

In: a folder. Out: `metrics.jsonl`, `resolved.toml`, `profile.json`,
`environment.json` and `summary.json` with planted figures.
"""

import json
import math
from pathlib import Path
from typing import Any


def tally(middle: int, width: int = 6, dtype: str = "float16", **more: Any) -> Any:
    """Return statistics of numbers around 2**middle, as `TensorStats.data()` has them.

    They reach `width` powers of two to both sides.
    """
    exponents = {
        str(middle + off): round(4096 * math.exp(-((2.5 * off / width) ** 2)))
        for off in range(-width, width + 1)
    }
    told = {
        "dtype": dtype,
        "count": sum(exponents.values()),
        "zeros": 0,
        "subnormals": 0,
        "infs": 0,
        "nans": 0,
        "amax": 1.5 * 2.0 ** (middle + width),
        "amin": 2.0 ** (middle - width),
        "exponents": exponents,
        "casts": {},
    }
    return told | more


def counted(exponents: dict[int, int], **more: Any) -> Any:
    powers = {str(power): count for power, count in exponents.items()}
    amax = 1.5 * 2.0 ** max(exponents, default=0)
    return tally(0, exponents=powers, amax=amax, count=sum(exponents.values()), **more)


def step(number: int, **more: Any) -> dict[str, Any]:
    told = {
        "step": number,
        "epoch": 1,
        "loss": 2.0 / number,
        "lr": 1e-3,
        "scale": 1024.0,
        "skipped": False,
        "found_inf_in": [],
        "grad_norm": 1.0,
        "seconds": {"input": 0.001, "forward": 0.04, "backward": 0.05, "update": 0.01},
    }
    return told | more


def profile(**more: Any) -> dict[str, Any]:
    """Return the profile of a sound step, as part of a run's folder."""
    row = {"calls": 12, "dtypes": ["bf16", "bf16"]}
    told = {
        "wall_s": 0.1,
        "rows": [
            row | {"op": "mm", "shapes": [[512, 768], [768, 768]], "self_s": 0.06},
            row | {"op": "gelu", "shapes": [[512, 768]], "self_s": 0.02},
        ],
        "casts_s": 0.005,
        "gemm_s": 0.06,
        "fp32_only_s": 0.005,
        "python_s": 0.005,
        "waits": 0,
        "wait_s": 0.0,
        "input_s": 0.001,
        "device": "cpu",
        "level": "O2",
        "dtype": "bf16",
    }
    return told | more


def environment() -> dict[str, Any]:
    """Return what is known of a sound machine and of weights that came in fp32."""
    machine = {
        "chip": "a processor",
        "instruction_sets": ["AVX512", "AVX512-BF16", "AMX-BF16"],
        "rates": {"fp32": 1.0, "bf16": 8.0, "fp16": 8.0},
        "fp16_accumulation": False,
    }
    weights = {"layer.0.weight": "fp32", "head.weight": "fp32"}
    return {"machine": machine, "weights": weights}


def write(
    folder: Path,
    records: list[dict[str, Any]],
    *,
    settings: dict[str, Any] | None = None,
    **files: Any,
) -> Path:
    """Write a run's folder; return it.

    `records` are lines of metrics.jsonl; `settings` replace those of a sound run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    told = {
        "level": "O2",
        "dtype": "bf16",
        "master_weights": "fp32",
        "loss_scale": "none",
    }
    told |= {"device": "cpu", "probe": "sampled"}
    text = "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in (settings or told).items()
    )
    (folder / "resolved.toml").write_text(text, encoding="utf-8")
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def sick(folder: Path, hostile: str = "") -> Path:
    """Write a run in fp16 that has many faults; return its folder.

    `hostile` is put into names of modules and of parameters.
    """
    records: list[dict[str, Any]] = []
    scale = 65536.0
    for number in range(1, 401):
        skipped = number % 19 == 0
        record = step(number, scale=scale, skipped=skipped, lr=1e-3 / number)
        if skipped:
            record["found_inf_in"] = [f"encoder.layer.3.output{hostile}.weight"]
            scale /= 2
        elif number % 19 == 9:
            scale *= 2
        records.append(record)
        if number % 20 == 1:
            tensors = {}
            for layer in range(6):
                name = f"bert.encoder.layer.{layer}.attention.self{hostile}.query"
                tensors[f"{name}:output"] = tally(2 * layer - 2, dtype="float16")
                low = 3 * layer - 24
                powers = {low: 2000, low + 4: 4000}
                tensors[f"{name}:grad"] = counted(powers, zeros=2000)
                wide = f"bert.encoder.layer.{layer}.intermediate{hostile}.dense"
                tensors[f"{wide}:output"] = tally(3 + 2 * layer // 2, dtype="float16")
            last = f"bert.encoder.layer.5.output{hostile}.dense:output"
            tensors[last] = tally(9, 6, amax=50000.0)
            records.append({"step": number, "event": "stats", "tensors": tensors})
    where = [f"bert.encoder.layer.5.output{hostile}.dense:output", "model:output"]
    records.append({"step": 114, "event": "non_finite", "where": where})
    bad = {
        "phase": "forward",
        "scale": 1024.0,
        "module": f"bert.encoder.layer.5.output{hostile}.dense",
        "kind": "Linear",
        "op": "linear",
        "nonfinite_kind": "inf",
        "cause": "forward range",
        "evidence": "inputs reach 8.3e+04, float16 holds 65504; finite in float32",
        "advice": "Keep it in float32: --policy 'lean + module:*.output.dense=fp32'.",
        "reproduced": True,
    }
    records.append({"step": 114, "event": "bad_op", **bad})
    half = {"dtypes": ["fp16", "fp16"], "calls": 24}
    rows = [
        {"op": "mm", "shapes": [[500, 770], [770, 770]], "self_s": 0.03, **half},
        {"op": "_to_copy", "shapes": [[770, 770]], "self_s": 0.03, **half},
        {"op": "layer_norm", "shapes": [[500, 770]], "self_s": 0.012, **half},
        {"op": f"odd{hostile}", "shapes": [[1]], "self_s": 0.001, **half},
    ]
    settings = {"level": "O1", "dtype": "fp16", "loss_scale": "dynamic"}
    return write(
        folder,
        records,
        settings=settings | {"device": "cuda"},
        profile=profile(
            rows=rows, casts_s=0.03, gemm_s=0.03, device="cuda", waits=4, wait_s=0.01
        ),
        environment=environment(),
        summary={"level": "O1", "dtype": "fp16", "padded_share": 0.4},
    )
