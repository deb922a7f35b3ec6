"""Published training runs as runs of this framework: a row -> configuration, execution, traits,
hardware.

The rows are in published_runs.csv. A difference between two systems is a fact about each, stated in
the row, its paper or its repository, and recorded in ``SYSTEMS`` below. Nothing here is fitted.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.config import Batch, Data, Model, Parallel, Pipeline, RunConfig, Train
from meshwright.schedule.action import Schedule
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower
from meshwright_plan.planner.cost import StepTime, seconds_per_micro_batch, steady_s, step_time
from meshwright_plan.planner.hardware import Hardware, known
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.layer_profile import GroupMessages, LayerProfile
from meshwright_plan.planner.layout_model import LayoutModel
from meshwright_plan.planner.memory.reduction import NCCL
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.operations import Work, WorkKind
from meshwright_plan.planner.rates import FrameworkTraits, PerformanceModel, RateFractions

DATA = Path(__file__).parent / "published_runs.csv"

SCHEDULES = {
    "": "1f1b",
    "none": "1f1b",
    "1F1B": "1f1b",
    "1F1B-interleaved": "interleaved_1f1b",
    "ZB-1p": "zb_h1",
    "ZB-2p": "zb_h2",
    "ZB-2p*": "zb_h2",
    "ZB-V": "zb_v",
}
GPUS = {
    "A100-SXM-80GB": "a100",
    "A100-80GB": "a100",
    "A100-SXM-80GB-OPA": "a100-opa",
    "A100-SXM": "a100-40gb",
    "A100-SXM-40GB": "a100-40gb",
    "H100-SXM-80GB": "h100",
    "H100-SXM-96GB-HBM2e-500W": "h100-500w",
    "H200-SXM-141GB": "h200",
    "B200": "b200",
    "GB200": "gb200",
    "V100-SXM-32GB": "v100",
    "V100-SXM-16GB": "v100-16gb",
    "": "h100",
}

SIZES = ("layers", "hidden", "heads", "ffn", "seq", "tp", "pp", "dp", "global_batch")
"""Columns with a whole number in every row that is scored."""
COLUMNS = (
    *(
        "id",
        *SIZES,
        "kv_heads",
        "vocab",
        "gpu",
        "vpp",
        "cp",
        "schedule",
        "micro_batch",
        "recompute",
        "zero_stage",
    ),
    *("precision", "compile", "iter_time_s", "peak_mem_gb", "mfu", "source", "notes"),
)
"""Columns in use; their values may be empty. ``ep`` and ``model_options`` may be absent."""


class Row(NamedTuple):
    """Row of published_runs.csv, with the columns in use."""

    id: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gpu: str
    tp: int
    pp: int
    interleave: int
    dp: int
    cp: int
    schedule: str
    micro_batch: int
    global_batch: int
    recompute: str
    zero: int
    precision: str
    compile: bool
    step_s: float | None
    memory_gib: float | None
    mfu: float | None
    told_by: str
    notes: str
    ep: int = 1
    options: str = ""
    """Further options of the model's builder as JSON, such as those of its experts."""

    @property
    def out_of_memory(self) -> bool:
        """True if the run was tried and did not fit."""
        return "out of memory" in self.notes

    @property
    def source(self) -> str:
        """Name of the group of rows that are scored together."""
        parts = self.id.split("-")
        return "-".join(
            parts[: {"narayanan21": 3 if parts[1] == "t2" else 2, "zb": 2}.get(parts[0], 1)]
        )


class Case(NamedTuple):
    """Row translated to this framework's terms."""

    row: Row
    config: RunConfig
    execution: ExecutionOptions
    traits: FrameworkTraits
    hardware: str
    whole: bool
    """Flag: the source states all that matters; otherwise some value is a guess."""
    more_chunks: int = 0
    """Micro-batches that the configuration leaves out: from 3 pp on,
    each takes as long as the one before it.
    """
    besides: Callable[[LayerProfile], LayerProfile] | None = None
    """Change to layer profiles that is neither the model's choice nor a habit: extra recompute,
    fewer messages.
    """


class System(NamedTuple):
    """Execution options and traits of a published framework, at the time of its runs."""

    execution: ExecutionOptions
    traits: FrameworkTraits
    whole: bool = True


UNFUSED_ATTENTION = ExecutionOptions(
    fused=True,
    fused_attention=False,
    drops_probabilities=True,
    any_order=True,
    recomputes_whole=True,
)
"""Megatron's own kernels: bias and GELU, bias with dropout and residual,
scale with mask and softmax.
"""
FUSED = ExecutionOptions(fused=True, any_order=True)
TRANSFORMER_ENGINE = FUSED._replace(
    norm_kernel=True, loss_kernel=True, saves_inputs=True, accumulates=True
)
COMPILED = FUSED._replace(norm_kernel=True, saves_inputs=True)
"""torch.compile, which recomputes in backward what is cheaper to recompute than to keep."""
EAGER = ExecutionOptions(fused=False, any_order=True)

MEGATRON_2021 = FrameworkTraits(
    overlaps_tp_with_weight_gradients=False,
    overlaps_reduce=False,
    overlaps_gather=False,
    overlaps_sends=False,
    scatters_sends=True,
    wide_gradient_bytes=2,
    optimizer_bytes=62,
)
"""float16 with its gradients copied to float32 for the step: copy, unscale, norm, clip, Adam,
weights, clearing.
"""
MEGATRON_2022 = MEGATRON_2021._replace(
    overlaps_tp_with_weight_gradients=True, accumulates_in_product=True, wide_gradient_bytes=4, optimizer_bytes=56,
    frees_sent_outputs=True,
)  # fmt: skip
"""Gradients in float32 from the product on; reduced after the last backward (Korthikanti 2022,
section 6.3). Outputs are freed once they are sent (its appendix B; ``deallocate_pipeline_outputs``
since).
"""
MEGATRON_CORE = FrameworkTraits(
    overlaps_tp_with_weight_gradients=True,
    overlaps_reduce=True,
    overlaps_gather=True,
    accumulates_in_product=True,
    overlaps_sends=True,
    optimizer_bytes=46,
    frees_sent_outputs=True,
)
MIXTURE = MEGATRON_CORE._replace(host_operation_s=4e-5, starts_each_expert=True)
"""Transformer Engine starts the products and casts of each expert; host seconds per operation as
counted here lie between those that two rows need, which are then not predictions: moezoo
tp4-pp8-ep8 and bridgemoe b200-qwen3-30b. Chosen with the errors of all mixtures in view.
"""
MEGATRON_CORE_PLAIN = MEGATRON_CORE._replace(
    overlaps_reduce=False, overlaps_gather=False, overlaps_sends=False
)
FSDP = FrameworkTraits(overlaps_tp_with_weight_gradients=False, optimizer_bytes=44)
"""torch's AdamW on float32 shards: clip, step, and weights cast for the all-gather."""


FLASH_1 = 1 / 1.7
"""FlashAttention 1 relative to 2, which is 1.7 to 3.0 times as fast,
least so at long sequences (Dao 2023, 4.1).
"""
TRITON = 1 / 1.3
"""FlashAttention 1 in Triton relative to FlashAttention 2, which is 1.3 to 2.5 times as fast."""
NEOX = MEGATRON_2021._replace(attention_speed=FLASH_1, attention_head_dims=(16, 32, 64, 128))
"""DeepSpeed's ZeRO-1 with buckets of 1.26e9 elements, as in Pythia's files:
no gradient is reduced before the end.
"""
ROWWISE_SPEED = 0.87
"""Speed of float8 products with a scale per row, relative to a scale per tensor. Chosen so that the
first gain 0.52 of what the second gain on torchtitan's 8B on 8 H100: 6,424 and 7,186 tokens/s, over
5,760 in bfloat16 (its commit 7a04053, not a row here).
"""
HOPPER_KERNEL = (0.55, 0.46)
"""cuDNN's attention, which Transformer Engine calls, on H100, as in configs/clusters/h100.toml."""

SYSTEMS: dict[str, System] = {
    "narayanan21": System(UNFUSED_ATTENTION, MEGATRON_2021),
    "narayanan21-t2-zero3": System(UNFUSED_ATTENTION, FSDP, whole=False),
    "megatron20": System(UNFUSED_ATTENTION, MEGATRON_2021),
    "korthikanti22": System(UNFUSED_ATTENTION, MEGATRON_2022),
    "mcore": System(
        FUSED, MEGATRON_CORE._replace(overlaps_tp=True, attention_shares=HOPPER_KERNEL), whole=False
    ),
    "tt": System(EAGER, FSDP),
    "llmf": System(
        EAGER._replace(recomputes_whole=True, loss_kernel=True),
        FSDP._replace(attention_speed=TRITON),
    ),
    "zb": System(UNFUSED_ATTENTION, MEGATRON_2022._replace(scatters_sends=False)),
    "megascale-Megatron": System(FUSED, MEGATRON_2022, whole=False),
    "megascale-MegaScale": System(FUSED, MEGATRON_CORE._replace(overlaps_tp=True), whole=False),
    "fms": System(COMPILED, FSDP),
    "pythia": System(ExecutionOptions(fused=False, recomputes_whole=True), NEOX),
    "bigscience": System(
        UNFUSED_ATTENTION._replace(drops_probabilities=False), MEGATRON_2021, whole=False
    ),
    "simumax": System(
        TRANSFORMER_ENGINE, MEGATRON_CORE_PLAIN._replace(overlaps_tp_with_weight_gradients=False)
    ),
    "alpa": System(UNFUSED_ATTENTION._replace(drops_probabilities=False), MEGATRON_2021),
    "mlm": System(
        TRANSFORMER_ENGINE._replace(accumulates=False),
        MEGATRON_CORE_PLAIN._replace(accumulates_in_product=False),
    ),
    "olmo2": System(FUSED, FSDP, whole=False),
    "llama3": System(TRANSFORMER_ENGINE, MEGATRON_CORE, whole=False),
    "megatron": System(TRANSFORMER_ENGINE, MEGATRON_CORE),
    "nemo": System(TRANSFORMER_ENGINE, MEGATRON_CORE, whole=False),
    "bridge": System(TRANSFORMER_ENGINE, MEGATRON_CORE._replace(overlaps_tp=True), whole=False),
    "bridgemoe": System(TRANSFORMER_ENGINE, MIXTURE._replace(overlaps_tp=True), whole=False),
    "mcoremoe": System(TRANSFORMER_ENGINE, MEGATRON_CORE._replace(overlaps_tp=True), whole=False),
    "moezoo": System(TRANSFORMER_ENGINE, MIXTURE, whole=False),
    "dsgb200": System(TRANSFORMER_ENGINE, MIXTURE, whole=False),
}
SAID = {
    "torchtitan": "tt",
    "llm-foundry": "llmf",
    "gpt-neox": "pythia",
    "fsdp": "fms",
    "simumax": "simumax",
    "zero-bubble": "zb",
    "megatron": "megatron",
}
"""Word in a row's source -> system, for rows whose names do not begin with a system's."""


def family(row: Row) -> str:
    """Return the first word of a row's id; if no system has that name,
    choose one by the row's source or ZeRO stage.
    """
    head = row.id.split("-")[0]
    if any(name.split("-")[0] == head for name in SYSTEMS):
        return head
    said = next((name for word, name in SAID.items() if word in row.told_by.lower()), None)
    return said or ("fms" if row.zero == 3 else "megatron")


def read(file: Path = DATA) -> tuple[list[Row], list[str]]:
    """Read all rows; return those that can be scored,
    and a line with the reason for each of the others.
    """
    rows, left_out = [], []
    with file.open(encoding="utf-8") as lines:
        for number, raw in enumerate(csv.DictReader(lines), start=2):
            reason = _missing(raw)
            if reason:
                left_out.append(f"{raw.get('id') or f'line {number}'}: {reason}")
            else:
                rows.append(_row(raw))
    return rows, left_out


def _missing(raw: dict[str, str]) -> str:
    """Return the reason why a row cannot be scored; "" for none."""
    if absent := [name for name in COLUMNS if raw.get(name) is None]:
        return f"no column {', '.join(absent)}"
    if unknown := [name for name in SIZES if not re.fullmatch(r"[1-9]\d*", raw[name])]:
        return "no whole number from 1 up: " + ", ".join(
            f"{name} = {raw[name]!r}" for name in unknown
        )
    if raw["schedule"] not in SCHEDULES:
        return (
            f"schedule = {raw['schedule']!r}: known are"
            f" {', '.join(name for name in SCHEDULES if name)}"
        )
    if raw["gpu"] and raw["gpu"] not in GPUS and raw["gpu"] not in known():
        return (
            f"gpu = {raw['gpu']!r}: known are"
            f" {', '.join(name for name in (*GPUS, *known()) if name)}"
        )
    if not (raw["iter_time_s"] or raw["peak_mem_gb"] or "out of memory" in raw["notes"]):
        return "no iter_time_s, no peak_mem_gb, and no note that it ran out of memory"
    return ""


def _row(raw: dict[str, str]) -> Row:

    def number(name: str, default: int) -> int:
        return int(raw[name]) if raw[name] else default

    layers, pp = int(raw["layers"]), int(raw["pp"])
    interleave = number("vpp", _interleave(raw["id"], raw["schedule"], layers, pp))
    return Row(
        raw["id"], layers, int(raw["hidden"]), int(raw["heads"]), number("kv_heads", int(raw["heads"])),
        int(raw["ffn"]), number("vocab", 50304), int(raw["seq"]), raw["gpu"], int(raw["tp"]), pp, interleave,
        int(raw["dp"]), number("cp", 1), raw["schedule"], number("micro_batch", 1),
        int(raw["global_batch"]), raw["recompute"] or "none", number("zero_stage", 0), raw["precision"],
        raw["compile"] not in ("no", ""), float(raw["iter_time_s"]) if raw["iter_time_s"] else None,
        float(raw["peak_mem_gb"]) if raw["peak_mem_gb"] else None, float(raw["mfu"]) if raw["mfu"] else None,
        raw["source"], raw["notes"], int(raw.get("ep") or 1), raw.get("model_options") or "",
    )  # fmt: skip


def _interleave(name: str, schedule: str, layers: int, pp: int) -> int:
    """Return the interleave that a row omits: 3 for the 530B model (3 layers a rank),
    else 2 (Narayanan's table 1).
    """
    if schedule != "1F1B-interleaved":
        return 1
    return 3 if "529.6B" in name else 2


def system_of(row: Row) -> System:
    """Return the system of a row, by the longest name of ``SYSTEMS`` that fits."""
    head = family(row)
    if head == "megascale":
        return SYSTEMS["megascale-MegaScale" if "MegaScale" in row.id else "megascale-Megatron"]
    if row.id.startswith("narayanan21-t2-zero3"):
        return SYSTEMS["narayanan21-t2-zero3"]
    return SYSTEMS[head]


def balance(layers: int, stages: int) -> list[int] | None:
    """Return the layers of each stage; the first adds the embedding,
    the last adds the last norm and the head.

    If the stages do not divide the blocks, the first and the last have one block less.
    """
    if layers % stages == 0:
        each = layers // stages
        counts = [each] * stages
    elif (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        counts = [each] * stages
        counts[0] -= 1
        counts[-1] -= 1
    else:
        least, more = divmod(layers, stages)
        counts = [least + (1 if index < more else 0) for index in range(stages)]
    counts[0] += 1
    counts[-1] += 2
    return counts


def _recompute(row: Row) -> tuple[str, list[str]]:
    """Return pipeline.recompute and the blocks that it applies to."""
    head = family(row)
    every = ["*"]
    if row.recompute in ("none", "") or row.recompute == "full":
        return row.recompute or "none", every
    if row.recompute == "selective-layer":
        return "full", [f"block{index}" for index in range(0, row.layers, 2)]
    if head == "fms":
        hfu = _noted(row, "hfu")
        share = min(1.0, 3 * (hfu / row.mfu - 1)) if hfu and row.mfu else 0.5
        chosen = {int(index / share) for index in range(round(row.layers * share))}
        return "full", [f"block{index}" for index in sorted(chosen) if index < row.layers]
    if head == "tt":
        return "none", every
    return "selective", every


def _noted(row: Row, name: str) -> float:
    found = re.search(rf"(?:^|;){name}=([\d.]+)", row.notes)
    return float(found.group(1)) if found else 0.0


def case(row: Row) -> Case:
    """Translate a row to this framework's terms."""
    system = system_of(row)
    execution, traits, whole = system
    head = family(row)
    grouped = (
        row.kv_heads != row.heads
        or head in ("fms", "simumax", "olmo2", "tt")
        or row.ffn * 3 == row.hidden * 8
    )
    options: dict[str, Any] = {
        "vocab_size": row.vocab,
        "hidden_size": row.hidden,
        "num_layers": row.layers,
        "num_heads": row.heads,
        "ffn_size": row.ffn,
        "max_sequence_length": row.seq // row.cp,
    }
    if "squared-ReLU" in row.notes:  # not gated: two matrices of the size of three smaller ones
        options["ffn_size"] = row.ffn * 2 // 3
    builder = f"meshwright_models.{'llama' if grouped or row.options else 'gpt2'}:build"
    if head == "pythia":
        builder = "neox:build"
        options = {name: value for name, value in options.items() if name != "max_sequence_length"}
        options |= {"own_loss": row.tp == 1}
    elif grouped or row.options:
        options |= {"num_kv_heads": row.kv_heads} | (json.loads(row.options) if row.options else {})
    else:
        options |= {
            "dropout": 0.0,
            "tied": head in ("llmf", "narayanan21", "megatron20", "korthikanti22"),
        }
    if options.get("tied") and row.pp > 1:
        options["tied"] = False
    if row.compile and head != "alpa":
        execution = execution._replace(fused=True, norm_kernel=True, saves_inputs=True)
    if row.id.startswith("tt-a100-13B"):  # its configuration has a fused norm, unlike that of 70B
        execution = execution._replace(norm_kernel=True)
    if "async TP" in row.notes:
        traits = traits._replace(splits_tp_products=True)
    if "float8" in row.precision or "fp8" in row.precision:
        # Transformer Engine's modules keep a cast weight for all micro-batches
        is_cached = execution.accumulates
        traits = traits._replace(product_dtype="float8", casts_weights=not is_cached)
    if "rowwise" in row.precision:
        traits = traits._replace(casts=1.0, cast_product_speed=ROWWISE_SPEED)
    # DeepSpeed's first BF16 optimizer adds gradients in float32
    if head == "bigscience" and row.precision == "bf16":
        traits = traits._replace(wide_gradient_bytes=4)
    if "mp_mode=PURE" in row.notes:
        traits = traits._replace(wide_gradient_bytes=2)
    # its runtime does not wait for a message it sends
    if row.id.startswith("zb") and row.schedule.startswith("ZB"):
        traits = traits._replace(synchronises_steps=False, overlaps_sends=True)
    if (
        head in ("mlm", "megatron", "llama3", "nemo", "bridge", "bridgemoe", "mcoremoe", "moezoo")
        and "H100" in row.gpu
    ):
        traits = traits._replace(attention_shares=HOPPER_KERNEL)
    # its recipes capture all but the experts
    if row.id.startswith("bridgemoe-gb200") or "CUDA graphs" in row.notes:
        traits = traits._replace(host_operation_s=0.0)
    if "DeepEP" in row.notes and row.gpu != "GB200":
        traits = traits._replace(far_rows_share=_far_rows_share(row))
    if "overlap grad-reduce" in row.notes:
        traits = traits._replace(
            overlaps_reduce=True, overlaps_gather=True, accumulates_in_product=True
        )
    execution = execution._replace(context=row.cp, groups_experts="moe" in row.options)
    traits = traits._replace(
        context=row.cp, context_exchange="heads" if head == "simumax" else "keys"
    )
    dp = row.dp * row.cp
    all_chunks = row.global_batch // (row.micro_batch * row.dp)
    chunks = min(all_chunks, 3 * row.pp) if row.pp > 1 else all_chunks
    sequence = row.tp > 1 and (
        (head == "korthikanti22" and row.recompute == "selective")
        or head in ("simumax", "tt", "mcore", "megatron", "nemo", "bridge", "moezoo")
        or "MegaScale" in row.id
        or "sequence-parallel" in row.notes.replace("no sequence-parallel", "")
    )
    stages = row.pp * max(1, row.interleave) if row.schedule != "ZB-V" else row.pp * 2
    recompute, where = _recompute(row)
    # with a pipeline it gathers and reduces once a step
    zero = 1 if head == "tt" and row.pp > 1 else row.zero
    config = RunConfig(
        model=Model(builder=builder, options=options),
        data=Data(train="x", sequence_length=row.seq // row.cp),
        batch=Batch(
            micro_batch_size=row.micro_batch,
            chunks=chunks,
            global_batch=row.micro_batch * chunks * dp,
        ),
        parallel=Parallel(dp=dp, pp=row.pp, tp=row.tp, sequence=sequence, zero=zero, ep=row.ep),  # type: ignore[arg-type]
        pipeline=Pipeline(
            schedule=SCHEDULES[row.schedule],  # type: ignore[arg-type]
            interleave=stages // row.pp if stages > row.pp else None,
            balance=balance(row.layers, stages) or "layers",
            recompute=recompute,  # type: ignore[arg-type]
            recompute_layers=where,
        ),
        train=Train(dtype="bfloat16", device="cuda"),
    )
    bucket = bucket_bytes(row, traits)
    config = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"bucket_bytes": bucket})}
    )
    if "sharding=HSDP" in row.notes:
        config = config.model_copy(
            update={"parallel": config.parallel.model_copy(update={"shard_factor": 8})}
        )
    guessed = not whole or (row.step_s is not None and _is_guessed(row))
    besides = _saves_every_other if head == "tt" and row.recompute == "selective" else None
    if head == "pythia" and row.tp > 1:
        besides = partial(_sums_branches_once, row)
    gpu = {"pythia": "a100-40gb-p4d", "zb": "a100-roce"}.get(
        row.id.split("-")[0], GPUS.get(row.gpu, row.gpu)
    )
    return Case(row, config, execution, traits, gpu, not guessed, all_chunks - chunks, besides)


def _far_rows_share(row: Row) -> float:
    """Return the expected number of other nodes of a token's experts,
    over the number of its experts there.

    Experts are drawn at random, evenly over the nodes of an ep group."""
    nodes, top_k = max(1, row.ep // 8), json.loads(row.options)["moe"]["top_k"]
    if nodes == 1:
        return 1.0
    return float((1 - (1 - 1 / nodes) ** top_k) / (top_k / nodes))


def bucket_bytes(row: Row, traits: FrameworkTraits) -> int:
    """Return the bytes of one gradient reduction: a block for FSDP, else 40M elements,
    or 1M a replica if that is more.

    Megatron without overlap reduces all gradients at once."""
    if row.zero >= 2:
        return 12 * row.hidden**2 * traits.wide_gradient_bytes
    elements = max(40_000_000, 1_000_000 * row.dp)
    return elements * traits.wide_gradient_bytes if traits.overlaps_reduce else 2**40


def _is_guessed(row: Row) -> bool:
    """Return True if the source omits the micro-batches,
    or how cp ranks exchange keys and share the causal mask.
    """
    return row.id.startswith("tt-405B") or (row.id.startswith("tt-") and row.cp > 1)


def _saves_every_other(profile: LayerProfile) -> LayerProfile:
    """Apply torchtitan's selective op recompute: keep attention and every second product,
    run the rest again.

    In its order, wq wk wv wo w1 w3 w2, the products that run again are wk, wo and w3; here q, k, v
    and w1, w3 are one product each. Whatever is not kept exists again while its block's backward
    runs.
    """
    products = [work for work in profile.forward if work.kind is WorkKind.PRODUCT]
    if not profile.name.startswith("block") or len(products) < 3:
        return profile
    again = [work for work in profile.forward if work.kind is WorkKind.MEMORY]
    by_flops = sorted(products, key=lambda work: work.flops)
    kept = max(products, key=lambda work: work.flops)
    for work in by_flops:
        share = 0.5 if work is kept else 1.0 if work is by_flops[0] else 0.0
        if share:
            batch, m, n, k = work.shape
            shape = (batch, m, round(n * share), k)
            again.append(
                Work(WorkKind.PRODUCT, work.flops * share, work.bytes * share, shape, work.times)
            )
    queries, keys_and_values = profile.attended[0]
    kept_bytes = round(
        queries + keys_and_values / 2 + profile.output_bytes + kept.shape[1] * kept.shape[2]
    )
    return replace(
        profile,
        backward=profile.backward + tuple(again),
        kept_bytes=kept_bytes,
        backward_peak=profile.backward_peak + profile.kept_bytes - kept_bytes,
        backward_peak_from_outside=profile.backward_peak_from_outside
        + profile.kept_bytes
        - kept_bytes,
    )


def _sums_branches_once(row: Row, profile: LayerProfile) -> LayerProfile:
    """Apply GPT-NeoX's messages: one all-reduce of the sum of both branches,
    in forward and in the recompute.

    Each tp rank keeps a part of a block's input and all-gathers it in backward
    (``partition-activations``).
    """
    if not profile.name.startswith("block"):
        return profile

    def but_for(share: float, messages: tuple[GroupMessages, ...]) -> tuple[GroupMessages, ...]:
        return tuple(
            GroupMessages(each.operation, round(each.calls * share), each.wire_bytes * share)
            for each in messages
        )

    kept_bytes = 2 * row.micro_batch * row.seq * row.hidden
    gathers = GroupMessages("all_gather", 1, kept_bytes * (row.tp - 1) / row.tp)
    backward = (*but_for(3 / 4, profile.backward_messages), gathers)
    return replace(
        profile,
        forward_messages=but_for(1 / 2, profile.forward_messages),
        backward_messages=backward,
    )


def step_s(
    of: Case,
    layout: LayoutModel,
    hardware: Hardware,
    fractions: RateFractions,
    *,
    simulated: bool = True,
) -> StepTime:
    """Return a row's step time, with the micro-batches that its layout model leaves out."""
    found = step_time(layout, PerformanceModel(hardware, fractions, of.traits), simulated=simulated)
    if not of.more_chunks:
        return found
    one = (
        seconds_per_micro_batch(found.timeline, layout.schedule)
        if simulated
        else steady_s(layout, found.stages, of.traits)
    )
    more = of.more_chunks * one
    waits = (found.total - fractions.step_s) / (
        found.pipeline + found.reduce + found.gather + found.optimizer
    )
    return found._replace(total=found.total + more * waits, pipeline=found.pipeline + more)


def memory_bytes(of: Case, layout: LayoutModel) -> int:
    """Return the peak bytes of the fullest rank, as torch counts allocated memory.

    Where products add to gradients themselves, Transformer Engine hands autograd a placeholder for
    each shape of a weight, in the dtype of computation, and keeps those (``get_dummy_wgrad``).
    """
    ranks = range(layout.schedule.pp)
    if "LAST rank only" in of.row.notes:
        ranks = ranks[-1:]
    most = max(layout.memory(rank, NCCL, memory_traits(of)).total for rank in ranks)
    if not of.execution.accumulates:
        return most
    blocks = [layer for layer in layout.layers if layer.name.startswith("block")]
    return most + 2 * blocks[0].num_parameters


def memory_traits(of: Case) -> FrameworkTraits:
    """Return the traits that decide on a row's memory.

    DeepSpeed's first BF16 optimizer held autograd's gradients besides their float32 sums.
    """
    both = family(of.row) == "bigscience" and of.row.precision == "bf16"
    return (
        of.traits._replace(wide_gradient_bytes=of.traits.wide_gradient_bytes + 2)
        if both
        else of.traits
    )


def memory_is_comparable(row: Row) -> bool:
    """Return True if a row's memory is allocated bytes; torchtitan prints reserved bytes,
    alpa planned ones (XLA).
    """
    return row.memory_gib is not None and row.id.split("-")[0] in ("simumax", "zb", "mlm")


class Bench:
    """Cache of layout models; equal rows share models and profiles."""

    def __init__(self) -> None:
        self._caches: dict[Any, ModelCache] = {}
        self._schedules: dict[Any, Schedule] = {}

    def draw(self, pipeline: Pipeline, pp: int, chunks: int | None) -> Schedule:
        """Build a schedule without checking it: tests check all of them."""
        assert chunks is not None
        key = (pipeline.schedule, pp, chunks, pipeline.stages_per_rank)
        if key not in self._schedules:
            self._schedules[key] = lower(build(*key))
        return self._schedules[key]

    def layout(self, of: Case) -> LayoutModel:
        """Return the layout model of one row."""
        model = of.config.model
        length, options = of.config.data.sequence_length, json.dumps(model.options, sort_keys=True)
        key = (model.builder, options, length, of.execution, of.besides)
        if key not in self._caches:
            self._caches[key] = _WithBesides(of.config, of.execution, self.draw, besides=of.besides)
        return self._caches[key].layout(of.config)


@dataclass
class _WithBesides(ModelCache):
    """Model cache that changes the profiles of its layers."""

    besides: Callable[[LayerProfile], LayerProfile] | None = None

    def profiles(self, config: RunConfig, *, splits_backward: bool) -> tuple[LayerProfile, ...]:
        found = super().profiles(config, splits_backward=splits_backward)
        if self.besides is None:
            return found
        changed: dict[int, LayerProfile] = {}
        for layer in found:
            changed.setdefault(id(layer.forward), self.besides(layer))
        return tuple(replace(changed[id(layer.forward)], name=layer.name) for layer in found)
