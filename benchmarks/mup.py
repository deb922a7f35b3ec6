"""muP measured: the coordinate check of Tensor Programs V (appendix D.1),
and the best learning rate by width.

    python benchmarks/mup.py coordinates [--model llama] [--widths 64 128 256 512]
    python benchmarks/mup.py rates [--steps 200]

Both train the included models in plain torch with ``torch.optim.AdamW``, with and without
``mup_base_size``, the base width being the smallest. Head size and depth stay, heads and ffn_size
grow with the width. The data are sequences in which each token follows from the two before it, by a
fixed random table, in 9 of 10 cases.

coordinates   root mean square of the change of each layer's output on a fixed batch after a few steps
rates         loss after the last step, a mean over the last ten, at learning rates 2^-13 .. 2^-5
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_models import decoder, gpt2, llama

VOCABULARY, LENGTH, SAMPLES, LAYERS, HEAD_DIM, BASE = 64, 16, 8, 2, 16, 64
WIDTHS, SEEDS, STEPS, EPS = (64, 128, 256, 512), 2, 3, 1e-8
FORMS = {
    "gpt2": partial(gpt2.build, max_sequence_length=64, dropout=0.0),
    "llama": llama.build,
    "decoder": partial(
        decoder.build, norm="layer_norm", mlp="gelu", qkv_bias=True, parallel_residual=True
    ),
}


def model_of(form: str, width: int, **options: Any) -> nn.Sequential:
    """Build a model of this width, from torch's generator."""
    heads = width // HEAD_DIM
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_layers": LAYERS,
        "num_heads": heads,
    }
    kv_heads = {} if form == "gpt2" else {"num_kv_heads": heads // 2}
    built: nn.Sequential = FORMS[form](
        **sizes, ffn_size=2 * width, tied=False, **kv_heads, **options
    )
    return built


def optimizer_of(model: nn.Sequential, rate: float) -> torch.optim.Optimizer:
    """Return torch's AdamW with the factors that the model declares, of matrices decayed."""
    groups = []
    for name, parameter in model.named_parameters():
        declared = getattr(model, "parameter_groups", [])
        own = next(
            (g for g in declared if any(fnmatchcase(name, pattern) for pattern in g["names"])), {}
        )
        settings = {
            "lr": rate * own.get("learning_rate_factor", 1.0),
            "eps": EPS * own.get("eps_factor", 1.0),
        }
        groups.append(
            {"params": [parameter], "weight_decay": 0.1 * (parameter.dim() > 1), **settings}
        )
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def samples(num: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of token ids (num, length + 1)."""
    table = torch.randint(
        VOCABULARY, (VOCABULARY, VOCABULARY), generator=torch.Generator().manual_seed(0)
    )
    draw = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(VOCABULARY, (num, length + 1), generator=draw)
        keep = torch.rand(num, length + 1, generator=draw) < 0.9
        for place in range(2, length + 1):
            follows = table[ids[:, place - 2], ids[:, place - 1]]
            ids[:, place] = torch.where(keep[:, place], follows, ids[:, place])
        yield ids


def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    """Take one step on ids (B, S + 1). Return the loss."""
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def outputs(model: nn.Sequential, ids: Tensor) -> dict[str, Tensor]:
    """Return the output of every layer by name;
    that of the last norm without the factor of the logits.
    """
    found, x = {}, ids
    for name, layer in model.named_children():
        x = layer(x)
        found[name] = x / getattr(layer, "multiplier", 1.0) if name == "norm" else x
    return found


def changes(
    form: str, width: int, rate: float = 0.01, seeds: int = SEEDS, **options: Any
) -> dict[str, float]:
    """Return layer -> root mean square of its output's change by :data:`STEPS` steps,
    a mean over ``seeds``.
    """
    found: dict[str, float] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = model_of(form, width, **options)
        optimizer, data = optimizer_of(model, rate), samples(SAMPLES, LENGTH, seed)
        fixed = next(data)[:, :-1]
        before = outputs(model, fixed)
        for _ in range(STEPS):
            step(model, optimizer, next(data))
        for name, after in outputs(model, fixed).items():
            found[name] = (
                found.get(name, 0.0) + (after - before[name]).square().mean().sqrt().item() / seeds
            )
    return found


def growth(measured: Sequence[float], widths: Sequence[int]) -> float:
    """Return the exponent e of a fit measured ~ width^e."""
    x = [math.log(width) for width in widths]
    y = [math.log(value) for value in measured]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    up = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return up / sum((a - mean_x) ** 2 for a in x)


def final_loss(width: int, rate: float, steps: int, **options: Any) -> float:
    """Return the loss of a Llama after training, a mean over the last ten steps;
    inf where it is NaN.
    """
    torch.manual_seed(0)
    model = model_of("llama", width, **options)
    optimizer, data, losses = optimizer_of(model, rate), samples(16, 32, 1), []
    for done in range(steps):
        for group in optimizer.param_groups:
            peak = group.setdefault("peak", group["lr"])
            group["lr"] = peak * min((done + 1) / 20, (steps - done) / (steps - 20))
        losses.append(step(model, optimizer, next(data)))
    last = sum(losses[-10:]) / 10
    return last if math.isfinite(last) else math.inf


def show_coordinates(form: str, widths: Sequence[int]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for title, options in (("without muP", {}), ("muP", {"mup_base_size": min(widths)})):
        rows = [changes(form, width, **options) for width in widths]
        print(
            f"{form}, {title}: change by {STEPS} steps\n{'layer':12}"
            + "".join(f"{w:>9}" for w in widths)
            + "   width^"
        )
        for name in rows[0]:
            measured = [row[name] for row in rows]
            print(
                f"{name:12}"
                + "".join(f"{value:9.4f}" for value in measured)
                + f"{growth(measured, widths):9.2f}"
            )
        figures[title] = dict(zip(map(str, widths), rows, strict=True))
    return figures


def show_rates(widths: Sequence[int], steps: int) -> dict[str, Any]:
    exponents, figures = range(-13, -4), {}
    for title, options in (("without muP", {}), ("muP", {"mup_base_size": min(widths)})):
        print(
            f"{title}: loss after {steps} steps\n{'width':>6}"
            + "".join(f"{f'2^{e}':>8}" for e in exponents)
            + "   best"
        )
        for width in widths:
            row = [final_loss(width, 2.0**e, steps, **options) for e in exponents]
            best = exponents[row.index(min(row))]
            print(
                f"{width:6}" + "".join(f"{loss:8.3f}" for loss in row) + f"   2^{best}", flush=True
            )
            figures[f"{title}, {width}"] = dict(zip(map(str, exponents), row, strict=True))
    return figures


def main() -> None:
    """Run one of the two measurements."""
    parser = argparse.ArgumentParser(
        description="Measure muP: coordinate check, or the best learning rate by width."
    )
    parser.add_argument("what", choices=("coordinates", "rates"))
    parser.add_argument("--model", choices=FORMS, default="llama")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.what == "coordinates":
        figures = show_coordinates(chosen.model, chosen.widths)
    else:
        figures = show_rates(chosen.widths, chosen.steps)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
