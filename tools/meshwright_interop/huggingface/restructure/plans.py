"""Translation of a transformers tensor-parallel plan to a meshwright sharding plan,
or the reason why there is none.

    transformers                        meshwright
    colwise                             column
    rowwise                             row
    colwise_gather_output, colwise_rep  vocab for the head, whose logits stay sharded for the loss;
    else column_whole
    rowwise_split_input, rowwise_rep    row_whole
    embedding_rowwise                   vocab
    replicated_with_grad_allreduce      heads: replicated, applied to this rank's heads; gradients are summed over tp
    replicate, sequence_parallel        replicate: the same as no entry
    moe_tp_experts, ep_dispatch_experts experts: whole on every tp rank; entries for parameters
    inside are left out
    moe_*, ep_*, packed_*, mla_*, ...   not supported: the model trains with tp = 1 only

A tied embedding and head must be sharded alike, or not at all. Weights without an entry in the plan
are replicated. If the probe sees such a weight act on a sharded tensor, it must be shared by all
heads (kind ``heads``). Otherwise the model has no tensor parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from meshwright_interop.huggingface.restructure.attention import REGISTRY, install_cores
from meshwright_interop.huggingface.restructure.blocks import merge_blocks
from meshwright_interop.huggingface.restructure.derived import DerivedLayer
from meshwright_interop.huggingface.restructure.experts import STYLES, around_experts
from meshwright_interop.huggingface.restructure.probe import ProbeResult

PRIVATE_TORCH = {
    "torch.nn.modules.conv._ConvNd": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

KINDS = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_whole",
    "colwise_rep": "column_whole",
    "rowwise_split_input": "row_whole",
    "rowwise_rep": "row_whole",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "heads",
    "replicate": "replicate",
    "sequence_parallel": "replicate",
    **dict.fromkeys(STYLES, "experts"),
}
GROUPS = "num_key_value_groups"
"""Attribute of an attention of transformers: query heads of each key-value head."""
NO_PIPELINE = "the model declares no plan for a pipeline"
LINEAR_KINDS = ("column", "row", "column_whole", "row_whole")


class TensorParallelPlan(NamedTuple):
    """Sharding plan of a model: module name -> kind, heads of split projections,
    and reasons for missing features.

    ``shared``: the projections whose heads several tp ranks may share. ``impossible`` maps "tp"
        (tensor parallelism) or
    "sequence" (sequence parallelism) to the reason.
    """

    plan: dict[str, str]
    divisible: dict[str, int]
    impossible: dict[str, str]
    shared: Mapping[str, tuple[Any, ...]] = MappingProxyType({})


def kinds_of(
    theirs: Mapping[str, str], names: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Translate the entries of a plan: name in the Sequential -> meshwright kind,
    and a problem per unsupported entry.

    Args:
        theirs: pattern of module names in transformers -> kind in transformers; ``*`` matches the
            index of a layer.
        names: name in transformers -> name in the Sequential, of every module and parameter of the
            model.
    """
    kinds: dict[str, str] = {}
    problems: list[str] = []
    for pattern, style in theirs.items():
        if not isinstance(style, str):
            problems.append(
                f"its plan (base_model_tp_plan) gives {pattern} a {type(style).__name__}, not a"
                " name"
            )
            continue
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+") + "$")
        found = [name for name in names if expression.match(name)]
        if found and style not in KINDS:
            problems.append(
                f"its plan shards {pattern} as {style!r}, which is not"
                f" supported{_expert_hint(style)}"
            )
        for name in found if style in KINDS else ():
            kinds[names[name]] = KINDS[style]
    return kinds, problems


def sharding_of(
    kinds: Mapping[str, str],
    problems: Sequence[str],
    layers: nn.Sequential,
    tied: Sequence[tuple[str, ...]],
    observations: ProbeResult,
) -> TensorParallelPlan:
    """Build the sharding plan of a restructured model.

    Args:
        kinds: module name -> kind, from :func:`kinds_of`.
        problems: unsupported entries, from :func:`kinds_of`; any of them rules out tensor
            parallelism.
        layers: the restructured model.
        tied: groups of names that share one parameter.
        observations: observations of the probe.
    """
    if not kinds and not problems:
        return TensorParallelPlan(
            {}, {}, {"tp": "the model declares no plan for tensor parallelism (base_model_tp_plan)"}
        )
    problems = [*problems, *_misfits(layers, kinds), *observations.problems]
    if problems:
        return TensorParallelPlan({}, {}, {"tp": problems[0]})
    kinds = {name: kind for name, kind in kinds.items() if kind != "replicate"}
    kinds |= dict.fromkeys(observations.per_head_modules, "heads")
    is_vocabulary_sharded = _vocabulary(layers, kinds, tied)
    impossible = {}
    unconfirmed = [name for name, is_uncut in observations.uncut.items() if not is_uncut]
    if not is_vocabulary_sharded:
        impossible["sequence"] = (
            "its token embedding is no plain nn.Embedding, or tied to a weight that is sharded"
            " otherwise: it stays replicated, and nothing splits the sequence"
        )
    elif unconfirmed:
        impossible["sequence"] = (
            f"{unconfirmed[0]} lies beside column-wise linears with gathered output, and did not"
            " take that output as its only input in the probe"
        )
    else:
        gathers, problem = _sequence_gathers(layers, kinds, observations)
        kinds |= gathers
        if problem is not None:
            impossible["sequence"] = problem
    dropout = next(_dropout_problems(layers, kinds), None)
    if dropout is not None:
        return TensorParallelPlan({}, {}, {"tp": dropout})
    kinds |= dict.fromkeys(
        (name for name, is_uncut in observations.uncut.items() if is_uncut), "uncut"
    )
    heads = _num_heads(layers, kinds)
    return TensorParallelPlan(
        merge_blocks(kinds, layers),
        merge_blocks(heads, layers),
        impossible,
        merge_blocks(_shared_heads(layers, heads, kinds), layers),
    )


def context_plan(
    layers: nn.Sequential, config: Any, observations: ProbeResult
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the entries of the plan for context parallelism, or the reason why there are none,
    by "cp".

    Attention that goes through transformers' registry gets a core. Layers of a derived plan take no
    positions.
    """
    if any(isinstance(layer, DerivedLayer) for layer in layers):
        has_plan = config.get_text_config().base_model_pp_plan
        why = "its plan for a pipeline does not fit it" if has_plan else NO_PIPELINE
        return {}, {"cp": f"{why} (base_model_pp_plan): its layers take no positions"}
    if observations.drops_probabilities:
        why = (
            "its attention drops probabilities by a function, and a rank's queries attend block by"
            " block to the keys that they see: no call has the rows of the whole mask (set the"
            " model.options of the attention's dropout to 0.0)"
        )
        return {}, {"cp": why}
    cores = install_cores(layers)
    if not cores:
        return {}, {
            "cp": f"no attention of the model goes through transformers' registry ({REGISTRY})"
        }
    return (
        merge_blocks(dict.fromkeys(cores, "context"), layers)
        | dict.fromkeys(layers._modules, "places"),
        {},
    )


def gathered_beside(layers: nn.Module, kinds: Mapping[str, str]) -> dict[str, list[str]]:
    """Find sibling modules of columns with gathered output that have weights and no entry:
    name -> these columns.
    """
    found: dict[str, list[str]] = {}
    for column in (name for name, kind in kinds.items() if kind == "column_whole"):
        parent = column.rpartition(".")[0]
        if parent.count(".") < 1:  # the head: no sibling uses its output
            continue
        for name, module in layers.get_submodule(parent).named_children():
            if f"{parent}.{name}" not in kinds and any(True for _ in module.parameters()):
                found.setdefault(f"{parent}.{name}", []).append(column)
    return found


def _expert_hint(style: str) -> str:
    return (
        " (a mixture of experts)" if style.startswith(("moe", "ep_", "grouped", "packed")) else ""
    )


def _misfits(layers: nn.Sequential, kinds: Mapping[str, str]) -> Iterator[str]:
    modules = dict(layers.named_modules())
    for name, kind in kinds.items():
        if name not in modules:
            yield (
                f"its plan shards the parameter {name} as {kind}, but only linears and embeddings"
                " can be sharded"
            )
        elif kind in LINEAR_KINDS and type(modules[name]) is not nn.Linear:
            yield (
                f"its plan shards {name}, a {type(modules[name]).__name__}, as {kind}, but only"
                " plain nn.Linear and nn.Embedding can be sharded"
            )


def _vocabulary(
    layers: nn.Sequential, kinds: dict[str, str], tied: Sequence[tuple[str, ...]]
) -> bool:
    """Set the kind ``vocab`` for the embedding and the head where possible; updates ``kinds``.

    Returns True if both are split over the vocabulary.
    """
    modules = dict(layers.named_modules())
    first, *_, last = layers._modules
    of_head = [name for name in kinds if name.startswith(f"{last}.")]
    heads = [name for name in of_head if kinds[name] == "column_whole"]
    tables = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
    is_plain = len(tables) == 1 and type(modules[tables[0]]) is nn.Embedding
    tied_modules = {name.rpartition(".")[0] for names in tied for name in names}
    for name in tables:
        kinds.pop(name, None)
    for name in heads:
        kinds[name] = "vocab"
    if is_plain and tables[0].startswith(f"{first}.") and (tables[0] not in tied_modules or heads):
        kinds[tables[0]] = "vocab"
        return bool(heads)
    for name in heads:
        if name in tied_modules:
            del kinds[name]
    return False


def _sequence_gathers(
    layers: nn.Sequential, kinds: Mapping[str, str], observations: ProbeResult
) -> tuple[dict[str, str], str | None]:
    """Find the modules before which sequence parallelism all-gathers the sequence, each with its
    kind, or the reason why it cannot.

    These modules begin with columns and end with a row. Their code takes the sequence length from
    their input, so that the input must be whole. Beside experts every module computes token by
    token, so that there its tokens may also be joined in one dim: (B, S, D) or (B S, D).

    A module that may mix tokens and has no entry, such as DeepSeek-V3's attention, is computed by
    every rank: ``gather_cut``. It has to make one (B, S, D) of one (B, S, D).
    """
    input_dims = observations.input_dims
    head, around = list(layers._modules)[-1], around_experts(layers)
    columns = [name for name, kind in kinds.items() if kind in ("column", "column_whole")]
    rows = [name for name, kind in kinds.items() if kind in ("row", "row_whole")]
    inside = [name for name in columns if not name.startswith(f"{head}.")]
    parents = list(dict.fromkeys(name.rpartition(".")[0] for name in inside))
    for parent in parents:
        if input_dims.get(parent, 3) != 3 and parent.rpartition(".")[0] not in around:
            problem = (
                f"{parent} takes an input of {input_dims[parent]} dims, which may join samples and"
                " tokens in one, and lies beside no experts: nothing gathers the sequence before it"
            )
            return {}, problem
    for parent in parents:
        has_row = any(name.startswith(f"{parent}.") for name in rows)
        if parent.count(".") < 2 or not has_row:
            problem = (
                f"{parent} has column-wise linears and no row-wise one: there is no place to gather"
                " the sequence"
            )
            return {}, problem
    mixers = [
        mixer
        for name, layer in layers.named_children()
        if name != head
        for mixer in _token_mixers(layer, name, parents, around)
    ]
    for mixer in mixers:
        is_inside = mixer.count(".") >= 2
        if not (is_inside and mixer in observations.mappings):
            problem = (
                f"{mixer} ({type(layers.get_submodule(mixer)).__name__}) may work on several tokens"
                " at a time, and has no entry in its plan: nothing gathers the sequence before it"
            )
            return {}, problem
    return {**dict.fromkeys(parents, "gather"), **dict.fromkeys(mixers, "gather_cut")}, None


def _token_mixers(
    module: nn.Module, name: str, parents: Sequence[str], around: set[str]
) -> Iterator[str]:
    """Yield modules outside ``parents`` that may mix tokens: convolutions,
    and modules whose children have weights.

    Those ``around`` experts do not.
    """
    for child, inner in module.named_children():
        place = f"{name}.{child}"
        if place in parents or place in around or not any(True for _ in inner.parameters()):
            continue
        if any(parent.startswith(f"{place}.") for parent in parents):
            yield from _token_mixers(inner, place, parents, around)
        elif isinstance(inner, nn.modules.conv._ConvNd) or any(
            True for part in inner.children() for _ in part.parameters()
        ):
            yield place


def _dropout_problems(layers: nn.Sequential, kinds: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each active dropout beside split linears:
    the plan does not name its input's sharded dim.
    """
    parents = {name.rpartition(".")[0] for name, kind in kinds.items() if kind in LINEAR_KINDS}
    for name, module in layers.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and name.rpartition(".")[0] in parents:
            yield (
                f"{name}, a dropout (p={module.p}), lies between sharded linears, and the plan has"
                " no entry for it"
            )


def _num_heads(layers: nn.Sequential, kinds: Mapping[str, str]) -> dict[str, int]:
    """Return the number of heads of each split projection whose parent module has a ``head_dim``
    or ``head_size``.
    """
    heads = {}
    for name, kind in kinds.items():
        module = layers.get_submodule(name)
        if kind not in ("column", "row") or not isinstance(module, nn.Linear):
            continue
        around: Any = layers.get_submodule(name.rpartition(".")[0])
        size = getattr(around, "head_dim", getattr(around, "head_size", None))
        total = module.out_features if kind == "column" else module.in_features
        if isinstance(size, int) and size > 0 and total % size == 0:
            heads[name] = total // size
    return heads


def _shared_heads(
    layers: nn.Sequential, heads: Mapping[str, int], kinds: Mapping[str, str]
) -> dict[str, tuple[Any, ...]]:
    """Return the entry in ``model.shared_units`` of each key and value projection
    of grouped-query attention.

    They are recognised by their heads: of three columns beside each other two have those of the
    first, divided by the number of groups, ``num_key_value_groups``, which the module's forward
    reads.
    """
    shared: dict[str, tuple[Any, ...]] = {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in heads):
        groups = getattr(layers.get_submodule(parent), GROUPS, None)
        if not isinstance(groups, int) or groups <= 1:
            continue
        siblings = [name for name in kinds if name.rpartition(".")[0] == parent]
        counts = {name: heads.get(name, 0) for name in siblings if kinds[name] == "column"}
        most = max(counts.values(), default=0)
        if sorted(counts.values()) != [most // groups] * 2 + [most]:
            continue
        first, second = (name for name, count in counts.items() if count < most)
        rows = layers.get_parameter(f"{first}.weight").shape[0] // heads[first]
        shared |= {first: ((rows,), 1, GROUPS), second: ((rows,), 1, "")}
    return shared
