"""Translation of Megatron-LM's flags.

Source of their meaning and defaults: ``megatron/training/arguments.py``, versions 0.12 to 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.errors import ConfigError
from meshwright.system.numbers import MAX_RANKS, whole_number
from meshwright_interop.configs.flags import LAUNCHER
from meshwright_interop.configs.megatron_batch import batch
from meshwright_interop.configs.megatron_data import data
from meshwright_interop.configs.megatron_keys import REFUSED, REST
from meshwright_interop.configs.megatron_model import MAX_LAYERS, model
from meshwright_interop.configs.megatron_mup import OWN_MUP
from meshwright_interop.configs.megatron_optimizer import learning_rate, optimizer
from meshwright_interop.configs.source_keys import DropReason, DropRule, SourceKey, is_off
from meshwright_interop.configs.translation import Translation

SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
FSDP = ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2")


def functional_test_items(items: Mapping[str, SourceKey]) -> dict[str, SourceKey]:
    """Return the flags in ``MODEL_ARGS`` of a ``model_config.yaml``, the form of Megatron-LM's functional tests.

    True is a flag alone. A flag with the value False is left out, as in the command line made of the file.
    """
    flags: dict[str, SourceKey] = {}
    for key, item in items.items():
        section, _, flag = key.partition(".")
        if section != "MODEL_ARGS" or item.value is False:
            continue
        value = item.value if isinstance(item.value, bool | list) or item.value is None else str(item.value)
        words = value.split() if isinstance(value, str) and flag.endswith(("data-path", "rampup-batch-size")) else value
        value = words[0] if isinstance(words, list) and len(words) == 1 else words
        flags[flag.lstrip("-").replace("_", "-")] = SourceKey(flag, value, item.place)
    return flags


def translate(translation: Translation, ranks: int | None, more: Sequence[DropRule] = ()) -> None:
    """Translate all flags.

    Args:
        translation: the flags; receives the meshwright keys.
        ranks: number of ranks of the whole job; None: as many as the launcher in the file starts.
        more: rows for keys without a translation, before those of Megatron-LM.

    Raises:
        ConfigError: Megatron-LM does not accept a value, or meshwright has no such model.
    """
    num_layers = translation.count("num-layers", 1, maximum=MAX_LAYERS) if translation.own_model else model(translation)
    size = ranks or _ranks(translation)
    _layout(translation, size, num_layers)
    _recompute(translation, num_layers)
    samples = batch(translation)
    optimizer(translation, learning_rate(translation, samples))
    data(translation)
    _services(translation)
    for name, why in REFUSED.items():
        if translation.has(name) and not is_off(translation.value(name)):
            translation.refuse(name, why)
    if translation.own_model and translation.boolean("use-mup"):
        translation.refuse("use-mup", OWN_MUP)
        translation.skip("mup-*")
    translation.drop_rest((*more, *REST))


def _ranks(translation: Translation) -> int | None:
    """Return the number of ranks, nproc_per_node x nnodes (default 1 node); None if the file does not fix both."""
    per_node = translation.value(f"{LAUNCHER}nproc-per-node")
    nodes = translation.value(f"{LAUNCHER}nnodes", None)
    num_per_node = whole_number(str(per_node), high=MAX_RANKS)
    num_nodes = whole_number(str(1 if nodes is None else nodes), high=MAX_RANKS)
    return None if num_per_node is None or num_nodes is None else num_per_node * num_nodes


def _layout(translation: Translation, size: int | None, num_layers: int) -> None:
    tp, pp = translation.count("tensor-model-parallel-size", 1), translation.count("pipeline-model-parallel-size", 1)
    cp = translation.optional_count("context-parallel-size") or 1
    exchange = translation.value("cp-comm-type", None)
    if cp > 1:
        translation.put("parallel.cp", cp)
        translation.put("parallel.cp_exchange", "heads" if exchange in ("a2a", ["a2a"]) else None)
    translation.put("parallel.tp", tp)
    translation.put("parallel.pp", pp)
    dp: int | None = None
    replica = tp * pp * cp
    if size is None:
        translation.put("parallel.dp", "auto", "fills the ranks; --ranks N fixes it")
    elif not size or size % replica:
        translation.decide(
            f'parallel.dp = "auto": the launcher starts {size} ranks, not a multiple of {replica}, the size of a '
            f"replica; --ranks N fixes it"
        )
    else:
        dp = size // replica
        axes = f"tp {tp} x pp {pp}" + (f" x cp {cp}" if cp > 1 else "")
        translation.put("parallel.dp", dp, f"{size} ranks / ({axes})")
    if translation.boolean("sequence-parallel"):
        if tp > 1:
            translation.put("parallel.sequence", True)
        else:
            translation.drop("sequence-parallel", DropReason.NEEDLESS, "tp is 1")
    _zero(translation, dp)
    _stages(translation, pp, num_layers)


def _zero(translation: Translation, dp: int | None) -> None:
    fsdp = next((name for name in FSDP if translation.boolean(name)), None)
    strategy = translation.text("data-parallel-sharding-strategy")
    if fsdp is not None:
        fallback = "optim_grads_params" if fsdp == "use-torch-fsdp2" else "no_shard"
        zero = SHARDING.get(strategy or fallback)
        if zero is None:
            raise ConfigError(
                "MW-INTEROP-004",
                f"{translation.place('data-parallel-sharding-strategy')}: one of {', '.join(SHARDING)}",
            )
        translation.boolean("use-distributed-optimizer")
        translation.put("parallel.zero", zero, f"--{fsdp}, {strategy or fallback}")
    elif translation.boolean("use-distributed-optimizer"):
        translation.put("parallel.zero", 1, "--use-distributed-optimizer")
    else:
        translation.put(
            "parallel.zero", 0, "no --use-distributed-optimizer: each replica keeps the whole optimizer state"
        )
    instances = translation.optional_count("num-distributed-optimizer-instances") or 1
    if instances > 1 and dp is not None and dp % instances == 0:
        translation.put("parallel.shard_factor", dp // instances)
    elif instances > 1:
        translation.drop(
            "num-distributed-optimizer-instances",
            DropReason.BY_HAND,
            "parallel.shard_factor, dp divided by this number",
        )
    if translation.boolean("optimizer-cpu-offload"):
        translation.put("parallel.offload", True)
    bucket = translation.optional_count("ddp-bucket-size")
    if bucket is not None:
        translation.put("parallel.bucket_bytes", 4 * bucket, f"{bucket:,} float32 elements")


def _stages(translation: Translation, pp: int, num_layers: int) -> None:
    per_stage = translation.optional_count("num-layers-per-virtual-pipeline-stage")
    virtual = translation.optional_count("num-virtual-stages-per-pipeline-rank")
    if per_stage is not None:
        virtual, rest = divmod(num_layers, pp * per_stage)
        if rest or not virtual:
            raise ConfigError(
                "MW-INTEROP-005",
                f"{translation.place('num-layers-per-virtual-pipeline-stage')}: {num_layers} layers over {pp} pipeline "
                f"ranks do not divide into such stages",
            )
    if pp > 1 and virtual is not None and virtual > 1:
        translation.put("pipeline.schedule", "interleaved_1f1b")
        translation.put("pipeline.interleave", virtual)
    first, last = (translation.integer(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if first is None and last is None:
        return
    between = pp - (first is not None) - (last is not None)
    others, rest = divmod(num_layers - (first or 0) - (last or 0), max(1, between))
    fits = not rest and (others >= 1 if between else others == 0)
    if virtual not in (None, 1) or pp == 1 or not fits:
        for end in ("first", "last"):
            translation.drop(
                f"decoder-{end}-pipeline-num-layers", DropReason.BY_HAND, "pipeline.balance, as numbers of layers"
            )
        return
    layers = [others if first is None else first, *[others] * (pp - 2), others if last is None else last]
    layers[0] += 1
    layers[-1] += 2 + translation.tree.get("model.options.mtp_layers", 0)
    translation.put("pipeline.balance", layers, "the embedding counts in the first stage, norm and head in the last")


def _recompute(translation: Translation, num_layers: int) -> None:
    granularity = translation.text("recompute-granularity")
    if translation.boolean("recompute-activations") or translation.boolean("checkpoint-activations"):
        granularity = granularity or ("full" if translation.has("checkpoint-activations") else "selective")
    method, number = translation.text("recompute-method"), translation.integer("recompute-num-layers")
    if granularity is None:
        return
    if granularity == "selective":
        translation.put("pipeline.recompute", "selective")
        modules = translation.value("recompute-modules")
        if modules is not None and modules not in ("core_attn", ["core_attn"]):
            translation.drop("recompute-modules", DropReason.NONE, "only core attention is recomputed")
        return
    translation.put("pipeline.recompute", "full")
    if method == "uniform" and number not in (None, 1):
        translation.drop(
            "recompute-num-layers", DropReason.DIFFERS, "the input of every layer is kept, not of one in this number"
        )
    elif method == "block" and number is not None:
        num_stages = translation.tree["parallel.pp"] * translation.tree.get("pipeline.interleave", 1)
        if num_layers % num_stages or "pipeline.balance" in translation.tree:
            translation.drop(
                "recompute-num-layers", DropReason.BY_HAND, "pipeline.recompute_layers, name patterns such as block1?"
            )
            return
        layers_per_stage = num_layers // num_stages
        names = [f"block{i}" for i in range(num_layers) if i % layers_per_stage < number]
        if len(names) < num_layers:
            translation.put("pipeline.recompute_layers", names, f"the first {number} of each stage")


def _services(translation: Translation) -> None:
    translation.put("run.seed", translation.integer("seed", 1234))
    translation.put("tracking.log_every", translation.count("log-interval", 100))
    every = translation.optional_count("save-interval") or translation.optional_count("persistent-save-interval")
    if every is not None:
        translation.put("checkpoint.every", every)
        translation.put("checkpoint.asynchronous", translation.boolean("async-save"))
    minutes = translation.number("distributed-timeout-minutes")
    translation.put("launch.timeout_s", None if minutes is None else 60 * minutes)
    project, name = translation.label("wandb-project"), translation.label("wandb-exp-name")
    if project:
        translation.put("tracking.project", project)
        translation.put("tracking.wandb", "auto")
    if name:
        translation.put("run.name", translation.run_name(name))
    translation.put("watch.drift_every", translation.integer("check-weight-hash-across-dp-replicas-interval"))
