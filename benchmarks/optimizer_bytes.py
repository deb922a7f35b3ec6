"""Optimizer state and messages of a step, counted by dry runs of all ranks,
beside the formulas of the docs.

    python benchmarks/optimizer_bytes.py

A Llama of P parameters in float32 on dp 4, ZeRO-1. Formulas, in bytes on a rank, with M elements in
matrices that Muon steps, R = P - M others, and n = 4 replicas::

    adamw, schedule_free_adamw    states 8 P/n             wire 2 x 4 P (n-1)/n, gradients and weights
    lion                          states 4 P/n             wire the same
    muon                          states (4 M + 8 R)/n     wire more: 2 x 4 M/n (n-1)/n, to the homes and back
    adafactor                                              wire more: 2 (8 F + 16 W) (n-1)/n, F states, W weights
    all                                                    wire more: 2 x 8 x 8 (n-1)/n, loss, norm, flags and times

Both are means over the ranks: Muon's homes do not hold equally many matrices.
"""

from __future__ import annotations

from math import prod

from meshwright.config import RunConfig, resolve
from meshwright.model.build import configured_model
from meshwright.optimizer import factor_elements
from meshwright_plan.dryrun.fake_step import profile_rank
from meshwright_plan.dryrun.rank_profile import Category

DP, STEP_NUMBERS = 4, 8
OPTIONS = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_layers": 2,
    "ffn_size": 256,
}
OPTIMIZERS = ("adamw", "schedule_free_adamw", "lion", "muon", "adafactor")


def config_of(name: str) -> RunConfig:
    """Return the job with this optimizer."""
    tree = {
        "model": {
            "builder": "meshwright_models.llama:build",
            "options": OPTIONS | {"max_sequence_length": 64},
        },
        "data": {"train": "in memory", "sequence_length": 64},
        "batch": {"micro_batch_size": 1, "chunks": 1},
        "parallel": {"dp": DP, "pp": 1, "tp": 1, "zero": 1},
        "optimizer": {"name": name},
        "train": {"device": "cpu", "dtype": "float32"},
    }
    return resolve(RunConfig.model_validate(tree), DP)


def formulas(config: RunConfig) -> tuple[float, float]:
    """Return the bytes of the states and of the messages among the replicas, on a rank."""
    model, name = configured_model(config), config.optimizer.name
    sizes = {key: tuple(parameter.shape) for key, parameter in model.layers.named_parameters()}
    total, matrices = (
        sum(map(prod, sizes.values())),
        sum(prod(sizes[key]) for key in model.matrices),
    )
    share, wire = (DP - 1) / DP, 2 * (4 * total + 8 * STEP_NUMBERS) * (DP - 1) / DP
    if name == "muon":
        return (4 * matrices + 8 * (total - matrices)) / DP, wire + 2 * 4 * matrices / DP * share
    if name == "adafactor":
        states = sum(factor_elements(config.optimizer, shape) for shape in sizes.values())
        return 4.0 * states, wire + 2 * (8 * states + 16 * len(sizes)) * share
    return (4 if name == "lion" else 8) * total / DP, wire


def main() -> None:
    print(
        "| optimizer | states: dry run | formula | messages: dry run | formula"
        " |\n|---|---|---|---|---|"
    )
    for name in OPTIMIZERS:
        config = config_of(name)
        profiles = [profile_rank(config, rank) for rank in range(DP)]
        states = sum(profile.held.get(Category.OPTIMIZER, 0) for profile in profiles) / DP
        sent = (
            sum(each.call.wire_bytes for profile in profiles for each in profile.communication) / DP
        )
        expected_states, expected_sent = formulas(config)
        cell = f"{states:,.0f}" if states else "counted as `rest`"
        print(
            f"| `{name}` | {cell} | {expected_states:,.0f} | {sent:,.0f} | {expected_sent:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
