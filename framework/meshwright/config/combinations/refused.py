"""Pairs of features that are refused, with code and reason.

A pair that is neither here nor in proven.py is allowed: no code handles the two together. The
blueprint may still refuse it by a module's sizes, and config/rules.py refuses keys that mean nothing
beside a value of their own section.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.config.combinations.features import (
    LAYOUT,
    Traits,
    is_asked,
    keys_of,
    model_features,
)
from meshwright.config.keys import format_value
from meshwright.config.schema import RunConfig


class RefusedPair(NamedTuple):
    """Pair that a configuration is refused for, before a model is built."""

    code: str
    why: str
    """Reason."""
    advice: str
    """Next move."""
    first: str
    second: str
    has_no_effect: bool = False
    """True where one of the two has no effect beside the other, which a user would not expect."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys by which a configuration asks for both."""
        return tuple(dict.fromkeys((*keys_of(self.first), *keys_of(self.second))))

    def find_problem(self, config: RunConfig) -> str | None:
        """Return the message if a configuration asks for both, or None."""
        if not (is_asked(self.first, config) and is_asked(self.second, config)):
            return None
        link = "has no effect with" if self.has_no_effect else "with"
        pair = f"{_given(config, self.first)} {link} {_given(config, self.second)}"
        return f"{pair}: {self.why}; {self.advice}"


class RefusedTrait(NamedTuple):
    """Pair that needs the model to be known: the blueprint, or a rank, refuses it with ``code``,
    and names the module.
    """

    first: str
    second: str
    why: str
    code: str
    only: str = ""
    """Condition under which it is refused, if not always: verify's choice leaves the pair out in any
    case, ``meshwright layouts`` asks the blueprint.
    """


REFUSED = (
    RefusedPair(
        "MW-CONFIG-041",
        "nothing is sharded",
        "set parallel.zero = 1, or leave it out",
        "shards",
        "no ZeRO",
        has_no_effect=True,
    ),
    RefusedPair(
        "MW-CONFIG-042",
        "a rank keeps the whole gradient, so that reducing it more often saves nothing",
        "set parallel.zero = 2 with two shards or more, or leave it out",
        "reduce = microbatch",
        "whole gradients",
    ),
    RefusedPair(
        "MW-CONFIG-043",
        "there is nothing to put into it",
        "set parallel.offload = true, or leave the directory out",
        "offload directory",
        "no offload",
        has_no_effect=True,
    ),
    RefusedPair(
        "MW-CONFIG-104",
        "no weights are gathered",
        "set parallel.zero = 3, or leave it out",
        "units of layers",
        "replicated weights",
        has_no_effect=True,
    ),
    RefusedPair(
        "MW-CONFIG-106",
        "a forward and a backward of a stage take turns, and one would free a unit in which the other"
        " is",
        "set parallel.unit_layers = 1, or choose another schedule",
        "units of layers",
        "dualpipe_v",
    ),
    RefusedPair(
        "MW-CONFIG-105",
        "no weights are gathered",
        "set parallel.zero = 3, or leave it out",
        "kept weights",
        "replicated weights",
        has_no_effect=True,
    ),
    RefusedPair(
        "MW-CONFIG-088",
        "no keys are gathered",
        "leave one out",
        "cp head groups",
        "cp heads",
        has_no_effect=True,
    ),
    RefusedPair(
        "MW-CONFIG-089",
        "the tokens are dealt by the documents of each sample",
        "set data.document_boundaries = true, or use another order",
        "cp documents",
        "documents without boundaries",
    ),
    RefusedPair(
        "MW-CONFIG-107",
        "the tokens of a rank, and their order, are those of whole rows",
        'set parallel.cp = 1, or batch.padding = "keep"',
        "trimmed rows",
        "cp",
    ),
    RefusedPair(
        "MW-CONFIG-108",
        "a layer would be compiled anew for each length",
        '--train.compile=false, or batch.padding = "keep"',
        "trimmed rows",
        "compile",
    ),
    RefusedPair(
        "MW-CONFIG-091",
        "the optimizer steps whole parameters, and ranks would have parts of the experts",
        "set parallel.ep = 1, or choose another optimizer",
        "ep",
        "whole-parameter optimizer",
    ),
    RefusedPair(
        "MW-CONFIG-067",
        "a step of this optimizer needs whole matrices or parameters on the device, and"
        " offload moves it to the host",
        "leave offload out, or choose another optimizer",
        "offload",
        "optimizer without offload",
    ),
    RefusedPair(
        "MW-CONFIG-092",
        "files hold the states of meshwright's own optimizers only",
        "leave one of the two out",
        "offload directory",
        "own optimizer",
    ),
    RefusedPair(
        "MW-CONFIG-093",
        "a compiled layer is recomputed as a whole or not at all",
        'choose pipeline.recompute = "full", or --train.compile=false',
        "selective",
        "compile",
    ),
    RefusedPair(
        "MW-CONFIG-094",
        "a compiled layer recomputes its pointwise operations as it is",
        'leave pipeline.recompute out, choose "full", or --train.compile=false',
        "pointwise",
        "compile",
    ),
    RefusedPair(
        "MW-CONFIG-095",
        "the float8 kernels return bfloat16",
        'choose train.dtype = "bfloat16"',
        "fp8",
        "float16",
    ),
    RefusedPair(
        "MW-CONFIG-096",
        "the float8 kernels of GPUs return bfloat16",
        'choose train.dtype = "bfloat16"',
        "fp8",
        "GPU without bfloat16",
    ),
    RefusedPair(
        "MW-CONFIG-097",
        "it is for GPUs",
        "leave one out",
        "shared GPUs",
        "CPU",
        has_no_effect=True,
    ),
    RefusedPair(
        "MW-CONFIG-098",
        "it names GPUs",
        "leave one out",
        "GPU list",
        "CPU",
        has_no_effect=True,
    ),
    RefusedPair(
        "MW-CONFIG-099",
        "the optimizer averages the weights in place of a decay, and the schedule changes"
        " the learning rate",
        'set optimizer.schedule = "constant" (warmup_steps may stay)',
        "averaged weights",
        "rate schedule",
    ),
    RefusedPair(
        "MW-CONFIG-101",
        "the file has one number of micro-batches, and each batch size of the ramp another",
        "leave one of the two out",
        "schedule file",
        "batch ramp",
    ),
)
"""Pairs that the configuration alone decides."""

REFUSED_TRAITS = (
    RefusedTrait("tp", "tp ruled out", "the model declares so", "MW-RUN-004"),
    RefusedTrait("sequence", "sequence ruled out", "the model declares so", "MW-RUN-004"),
    RefusedTrait("cp", "cp ruled out", "the model declares so", "MW-RUN-004"),
    RefusedTrait("tp", "no sharding plan", "the model has no sharding_plan", "MW-TP-002"),
    RefusedTrait(
        "sequence",
        "one label per sample",
        "a sample has one label, not a sequence of them",
        "MW-TP-002",
    ),
    RefusedTrait(
        "cp", "one label per sample", "a sample has one label, not one for each token", "MW-CP-001"
    ),
    RefusedTrait(
        "cp",
        "no attention core",
        "the plan names no attention core, so that each rank would attend to its own tokens only",
        "MW-CP-002",
    ),
    RefusedTrait(
        "cp",
        "multi-token prediction",
        "labels are shifted along the sample, of which each rank has a part",
        "MW-CP-007",
    ),
    RefusedTrait(
        "cp documents", "no document starts", "the samples have no document starts", "MW-CP-010"
    ),
    RefusedTrait("ep", "no experts", "the plan names no experts", "MW-EP-001"),
    RefusedTrait(
        "selective",
        "no selective parts",
        "the model does not name what is cheap to compute and expensive to keep",
        "MW-PIPELINE-006",
    ),
    RefusedTrait(
        "ZeRO-3",
        "single-number parameter",
        "ZeRO-3 cuts parameters along their first dim",
        "MW-DP-001",
    ),
    RefusedTrait(
        "cp",
        "BatchNorm statistics",
        "BatchNorm takes the statistics of whole micro-batches",
        "MW-PIPELINE-041",
    ),
    RefusedTrait(
        "sequence",
        "BatchNorm statistics",
        "BatchNorm takes the statistics of whole micro-batches",
        "MW-PIPELINE-010",
    ),
    RefusedTrait(
        "trimmed rows",
        "dropout",
        "masks are drawn by positions in whole rows",
        "MW-PIPELINE-054",
    ),
    RefusedTrait(
        "trimmed rows",
        "BatchNorm statistics",
        "padding counts in the statistics",
        "MW-PIPELINE-055",
    ),
    RefusedTrait(
        "trimmed rows",
        "SyncBatchNorm",
        "padding counts in the statistics",
        "MW-PIPELINE-055",
    ),
    RefusedTrait(
        "trimmed rows",
        "other running buffers",
        "forward changes buffers, and may count padding",
        "MW-PIPELINE-055",
    ),
    RefusedTrait(
        "tp",
        "BatchNorm statistics",
        "BatchNorm takes the statistics of whole micro-batches",
        "MW-PIPELINE-011",
        only="the plan splits a module of the same layer",
    ),
    RefusedTrait(
        "16 bits",
        "BatchNorm statistics",
        "the statistics stay float32, beside which kernels take no 16-bit parameters",
        "MW-PIPELINE-013",
    ),
    RefusedTrait(
        "sequence",
        "SyncBatchNorm",
        "the ranks of a replica have parts of its tokens",
        "MW-PIPELINE-048",
    ),
    RefusedTrait(
        "tp",
        "SyncBatchNorm",
        "each rank would have statistics of its part of the features",
        "MW-PIPELINE-011",
        only="the plan splits a module of the same layer",
    ),
    RefusedTrait(
        "16 bits",
        "SyncBatchNorm",
        "the statistics stay float32, beside which kernels take no 16-bit parameters",
        "MW-PIPELINE-013",
        only="it keeps running statistics",
    ),
    RefusedTrait(
        "balance by work",
        "SyncBatchNorm",
        "statistics are those of consecutive samples",
        "MW-PIPELINE-049",
    ),
    RefusedTrait(
        "dp",
        "SyncBatchNorm and other coupling",
        "one takes the samples of all replicas, the other those of one",
        "MW-PIPELINE-050",
    ),
    RefusedTrait(
        "dp or cp",
        "other running buffers",
        "forward changes buffers, and nothing combines two replicas' values",
        "MW-PIPELINE-009",
    ),
    RefusedTrait(
        "sequence",
        "other running buffers",
        "forward changes buffers, which would see parts of samples",
        "MW-PIPELINE-010",
    ),
    RefusedTrait(
        "tp",
        "other running buffers",
        "forward changes buffers, which would see parts of the features",
        "MW-PIPELINE-011",
        only="the plan splits a module of the same layer",
    ),
    RefusedTrait(
        "selective",
        "other running buffers",
        "forward changes buffers, and would run twice",
        "MW-PIPELINE-012",
        only="a recomputed part holds the buffer",
    ),
    RefusedTrait(
        "full",
        "other running buffers",
        "forward changes buffers, and would run twice",
        "MW-PIPELINE-012",
    ),
)
"""Pairs of which one is a trait of the model or of its samples."""


OF_LAYOUTS: tuple[RefusedPair | RefusedTrait, ...] = (
    *(row for row in REFUSED if {row.first, row.second} & LAYOUT.keys()),
    *REFUSED_TRAITS,
)
"""Rows in which a layout or a model takes part: the others are of a configuration by itself."""


def find_refused(
    features: frozenset[str], *, always: bool = False
) -> RefusedPair | RefusedTrait | None:
    """Return the first row of :data:`OF_LAYOUTS` of which both features are there, or None.

    ``always``: leave out the rows that hold under a condition only.
    """
    for row in OF_LAYOUTS:
        is_conditional = isinstance(row, RefusedTrait) and bool(row.only)
        if row.first in features and row.second in features and not (always and is_conditional):
            return row
    return None


def find_excluding(name: str, traits: Traits) -> RefusedPair | RefusedTrait | None:
    """Return the row by which the model or the configuration excludes a feature of a layout, or
    None.
    """
    has = model_features(traits) | traits.settings
    for row in (*REFUSED_TRAITS, *REFUSED):
        other = {row.first: row.second, row.second: row.first}.get(name)
        if other in has:
            return row
    return None


def _given(config: RunConfig, name: str) -> str:
    """Return the values by which a configuration asks for a feature: ``parallel.tp = 2``."""
    written = []
    for key in keys_of(name):
        section, _, field = key.partition(".")
        value = getattr(getattr(config, section), field)
        if value is not None:
            written.append(f"{key} = {format_value(value)}")
    return " and ".join(written)
