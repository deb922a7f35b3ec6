"""Registry of the built-in optimizers: what each keeps, reads and needs.

Rules of the configuration, checkpoints, the planner, verify and docs/optimizers.md read the spec
of a name; no name of an optimizer is written there. The code of each is a file of
:mod:`meshwright.optimizer`, its plain twin a function of :mod:`meshwright.verify.plain_optimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

Form = Literal["signed", "square", "exact"]
"""Kind of the numbers of a state: of any sign; squares, of which codecs may keep the root; or such
that no codec may round them.
"""
StateFormat = Literal["float32", "bfloat16", "8bit"]
"""Format of optimizer states in memory; float32 stands for the dtype of the master weights."""


class StateSpec(NamedTuple):
    """State of an optimizer: one number per element."""

    name: str
    """Name in checkpoints."""
    form: Form = "signed"

    def is_stored_as(self, state_format: StateFormat) -> bool:
        """Return whether the state can have this format, which is not float32."""
        return state_format != "float32" and self.form != "exact"


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Facts of an optimizer besides its update."""

    title: str
    """Name in sentences."""
    states: tuple[StateSpec, ...]
    """States of each element that it steps on its own."""
    matrix_states: tuple[StateSpec, ...] = ()
    """States of the elements of weights that it steps as matrices."""
    saved_only: tuple[str, ...] = ()
    """Names of what checkpoints hold besides: other weights, or states of less than one number per
    element.
    """
    unit: Literal["element", "matrix", "parameter"] = "element"
    """Unit that an update depends on: the history of an element, of a whole matrix (ranks exchange
    their parts), or of a whole parameter (ranks sum over their parts).
    """
    keys: frozenset[str] = frozenset()
    """Keys of ``[optimizer]`` that it reads, and some others do not."""
    key_for: Mapping[str, str] = field(default_factory=dict)
    """Key that it does not read -> its own key with that meaning."""
    state_format: StateFormat | None = None
    """The format that its name stands for; None: that of ``optimizer.state_dtype``."""
    scales_eps: bool = True
    """True: the ``eps_factor`` of a parameter group is a factor on its eps."""
    averages_weights: bool = False
    """True: evaluation uses an average of the weights, which replaces a decay of the learning
    rate. It leaves skipped steps out.
    """
    extra_traffic: float = 0.0
    """Bytes that a step reads and writes per element besides 28, which are those of AdamW in one
    kernel: weights, gradient and two moments; negative: fewer.
    """
    matrix_traffic: float = 0.0
    """The same for an element of a matrix, without messages."""
    least_rate: float = 3e-3
    """Learning rate with which a step moves a small model's weights by a percent or more."""

    @property
    def formats(self) -> tuple[StateFormat, ...]:
        """Formats that its states can have besides float32."""
        if self.unit != "element" or self.state_format is not None:
            return ()
        return tuple(
            state_format
            for state_format in get_args(StateFormat)
            if any(state.is_stored_as(state_format) for state in self.states)
        )

    @property
    def needs_full_weights(self) -> bool:
        """True if a step needs whole parameters or matrices: their ranks communicate."""
        return self.unit != "element"


MOMENTS = (StateSpec("exp_avg"), StateSpec("exp_avg_sq", "square"))
_ADAMW = OptimizerSpec(title="AdamW", states=MOMENTS, keys=frozenset({"betas", "eps"}))

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": _ADAMW,
    "adamw8bit": replace(_ADAMW, title="AdamW in 8 bits", state_format="8bit"),
    "sgd": OptimizerSpec(
        title="SGD",
        states=(StateSpec("momentum"),),
        keys=frozenset({"momentum"}),
        scales_eps=False,
        extra_traffic=-8.0,
        least_rate=0.1,
    ),
    "muon": OptimizerSpec(
        title="Muon",
        states=MOMENTS,
        matrix_states=(StateSpec("momentum"),),
        unit="matrix",
        keys=_ADAMW.keys | {"muon_momentum", "nesterov", "ns_steps", "scale"},
        key_for={"momentum": "muon_momentum"},
        matrix_traffic=16.0,  # momentum 12, Nesterov's 12, the message 4, decay 8, update 8
    ),
    "lion": OptimizerSpec(
        title="Lion",
        states=(StateSpec("exp_avg"),),
        keys=frozenset({"betas", "eps"}),
        least_rate=1e-3,
    ),
    "schedule_free_adamw": OptimizerSpec(
        title="schedule-free AdamW",
        states=(StateSpec("exp_avg_sq", "square"), StateSpec("z", "exact")),
        saved_only=("y",),
        keys=_ADAMW.keys,
        averages_weights=True,
    ),
    "adafactor": OptimizerSpec(
        title="Adafactor",
        states=(),
        saved_only=("row_var", "col_var", "exp_avg_sq"),
        unit="parameter",
        keys=frozenset({"eps", "beta2_decay", "clip_threshold"}),
        scales_eps=False,
        extra_traffic=24.0,  # squares 8, their sums 8, the divided gradient 20, weights 16
        least_rate=1e-2,
    ),
}
"""Optimizers by ``optimizer.name``."""

DEFAULT = "adamw"
OWN = OptimizerSpec(title="the optimizer", states=())
"""Spec of an ``optimizer.builder``, whose states a trial finds."""

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]

KEYS_OF_SOME = frozenset[str]().union(*(spec.keys for spec in OPTIMIZERS.values()))
"""Keys of ``[optimizer]`` that only some optimizers read."""
