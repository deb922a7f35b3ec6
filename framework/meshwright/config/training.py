"""Sections of the configuration that describe training, saving, checks, tracking and launching,
with the defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from meshwright.config.bounds import Count, Length, Share, Steps
from meshwright.config.optimizers import (
    DEFAULT,
    OPTIMIZERS,
    OWN,
    OptimizerName,
    OptimizerSpec,
    StateFormat,
    StateSpec,
)
from meshwright.config.sections import FUNCTION, Section

BUILDER_DEFAULTS = ("learning_rate", "weight_decay")
"""Keys of ``[optimizer]`` whose default an optimizer of the user, or its options, replaces."""


class Optimizer(Section):
    """Optimizer, gradient clipping and learning-rate schedule."""

    name: OptimizerName = DEFAULT
    """Optimizer; docs/optimizers.md. adamw8bit is adamw with state_dtype = "8bit". muon steps
    matrices as a whole, by orthogonalised momentum, and all else by AdamW. lion has one state.
    schedule_free_adamw averages the weights in place of a decay of the learning rate. adafactor
    keeps the mean squares of rows and columns alone.
    """
    builder: str | None = Field(
        default=None,
        pattern=FUNCTION,
        description='a class or function, as in "torch.optim:RAdam" or "my_package:build"',
    )
    """Alternative to ``name``: a function of (parameter groups, **options)
    that returns a torch optimizer.
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the optimizer's builder."""
    learning_rate: PositiveFloat | None = 3e-4
    """Highest learning rate, reached after the warm-up. With ``builder`` its own,
    unless it is set here.
    """
    min_learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Learning rate at the end of the decay, which the last step has; none:
    a tenth of the highest.
    """
    schedule: (
        Literal["cosine", "linear", "wsd", "constant"] | Annotated[str, Field(pattern=FUNCTION)]
    ) = Field(
        default="cosine",
        description=(
            '"cosine", "linear", "wsd" or "constant"; or a function of (step, number of steps) that'
            ' returns a factor on optimizer.learning_rate, as "my_package.my_module:decay"'
        ),
    )
    """Decay of the learning rate after the warm-up; wsd is warmup-stable-decay.
    Or a function for the whole course.
    """
    warmup_steps: Steps = 0
    """First steps, in which the learning rate rises linearly."""
    decay_steps: Steps = 0
    """Last steps, in which the learning rate falls; wsd only."""
    decay_until: Steps = 0
    """Step at which the decay ends, before or after the last one; 0: the last.
    Later steps have min_learning_rate.
    """
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Betas of AdamW, schedule-free AdamW and Lion; the papers have (0.9, 0.999), and (0.9, 0.99)
    for Lion.
    """
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW. Lion: size of an averaged gradient below which its update is not the sign,
    but proportional.
    Adafactor: size of a gradient below which its update is proportional."""
    block_size: int = Field(default=256, ge=8, le=10**6, multiple_of=8)
    """Elements per scale of 8-bit states. A matrix whose rows it does not divide stays in 32 bits.
    """
    state_dtype: StateFormat = "float32"
    """Format of the states of adamw, sgd, lion and schedule_free_adamw (float64 with train.dtype
    float64). bfloat16: 2 instead of 4 bytes per number, rounded stochastically, by bits that are
    the same in every layout. 8bit: 1 byte, in blocks with a scale each, for matrices. Weights, such
    as z of schedule_free_adamw, keep their dtype.
    """
    momentum: Share = 0.9
    """Momentum of SGD; 0: SGD has no state."""
    muon_momentum: Share = 0.95
    """Momentum of Muon."""
    nesterov: bool = True
    """Nesterov momentum in Muon."""
    ns_steps: int = Field(default=5, ge=1, le=30)
    """Newton-Schulz iterations of Muon, in train.dtype (float32 for float16)."""
    scale: Literal["match_rms_adamw", "spectral"] = "match_rms_adamw"
    """Factor on Muon's updates of m x n matrices. match_rms_adamw: 0.2 sqrt(max(m, n)), for the
    learning rate of AdamW;
    spectral: sqrt(max(1, m/n))."""
    beta2_decay: float = Field(default=-0.8, le=0, ge=-1)
    """Adafactor: the squared gradient of step t enters the running means
    with weight t ** beta2_decay.
    """
    clip_threshold: float = Field(default=1.0, ge=1)
    """Adafactor: root mean square of a weight's update above which it is scaled down."""
    weight_decay: Annotated[float, Field(ge=0)] | None = 0.1
    """Weight decay of matrices, and of biases of experts. Other biases and norms: only by a
    parameter group. With ``builder`` its own, unless it is set here.
    """
    clip_norm: float = Field(default=1.0, ge=0)
    """Bound on the global gradient norm; 0 turns clipping off."""

    @model_validator(mode="after")
    def _leave_to_builder(self) -> Self:
        """Set to None the keys that an optimizer of the user has by itself,
        where they were not given.

        A dump of the configuration has all keys: only None marks a key that was not set, not even
        to its default.
        """
        for name in BUILDER_DEFAULTS:
            if self.builder is not None and name not in self.model_fields_set:
                object.__setattr__(self, name, None)  # frozen, and not yet in anybody's hands
            elif self.builder is None and getattr(self, name) is None:
                object.__setattr__(self, name, type(self).model_fields[name].default)
        return self

    @property
    def spec(self) -> OptimizerSpec:
        """Facts of the optimizer: what it keeps, reads and needs."""
        return OPTIMIZERS[self.name] if self.builder is None else OWN

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """States of each element that is stepped on its own; SGD without momentum has none."""
        has_none = "momentum" in self.spec.keys and self.momentum == 0
        return () if has_none else self.spec.states

    @property
    def state_format(self) -> StateFormat:
        """Format of the states that can have one besides float32."""
        return self.spec.state_format or self.state_dtype

    @property
    def has_blocks(self) -> bool:
        """True if states are stored in blocks of :attr:`block_size` elements."""
        return self.builder is None and self.state_format == "8bit"


Scale = Annotated[float, Field(gt=0, le=1e36)]


class LossScaling(Section):
    """Factor on the loss in backward, for float16: it falls after an overflow,
    and rises after steps without one.
    """

    fixed: Scale | None = None
    """Loss scale of all steps. Default: a dynamic one."""
    initial: Scale = 2.0**32
    """Loss scale of the first step."""
    minimum: Scale = 1.0
    """Smallest loss scale. An overflow there is treated as a NaN is, by ``watch.on_nonfinite``."""
    window: Length = 1000
    """Number of steps without overflow after which the loss scale rises."""
    growth: float = Field(default=2.0, ge=1.0, le=2.0**16)
    """Factor of a rise."""
    backoff: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Factor of a fall."""
    hysteresis: Count = 2
    """The loss scale falls from this many overflows since its last rise on; 1:
    at every overflow.
    """


class Train(Section):
    """Length of training, precision, device and validation."""

    steps: Length = 100
    """Optimizer steps of the run."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Precision of the computation; with 16 bits,
    master weights and the sums of gradients stay in float32.
    """
    linear: Literal["dtype", "fp8"] = "dtype"
    """Precision of the products of linears: ``dtype``, or float8 with rowwise scales (fp8);
    docs/precision.md.
    """
    fp8_keep: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None,
        description='a list of name patterns such as ["head", "block0", "*.attention.out"]',
    )
    """Linears that fp8 leaves in ``dtype``, by their name or an enclosing module's. Default: the
    first and last block and the head.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. auto: GPUs if torch sees one, else the CPU."""
    compile: bool | Literal["auto"] = "auto"
    """Apply torch.compile to each layer on its own. auto: on GPUs, unless parts of layers are
    recomputed, or Triton or a C compiler is missing, which is one warning.
    """
    validate_every: Steps = 0
    """Steps between validations; 0: only after the last step, if there is validation data."""
    validate_steps: Length = 8
    """Global batches in one validation."""
    gc_every: Steps = 50
    """Steps between runs of Python's garbage collector, the same on all ranks; 0:
    whenever Python starts it.
    """
    routing: Literal["off", "record", "replay"] = "off"
    """Experts of each token in the training steps: record them to files, or take them from files;
    docs/mixture-of-experts.md."""
    routing_directory: str | None = Field(default=None, pattern=r"^[^\x00]+$", description="a path")
    """Directory of these files. Default for a recording: ``routing`` in the run's directory."""
    callbacks: tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...] = ()
    """Functions ``module:function`` that take the parts of a rank and return an observer;
    docs/python.md.
    """


class Checkpoint(Section):
    """Times and place of saving. Resuming needs no key: the same command again continues the run."""

    directory: str = Field(
        default="",
        max_length=1024,
        pattern=(
            r"^((s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_.=+,-]+)*/?"
            r"|file://(/[A-Za-z0-9_.=+,-]+)+/?)?$"
        ),
        description='the path in an object store, such as "s3://bucket/prefix"',
    )
    """Path in an object store for the checkpoints, which lie in ``directory``/``run.name`` there;
    docs/checkpoints.md. "": in the run's directory.
    """
    every: Steps = 0
    """Steps between checkpoints; 0: none by the count of steps."""
    every_minutes: float = Field(default=30.0, ge=0, le=10**6)
    """Also save when this many minutes have passed since the last save began; 0: never. Rank 0's
    clock decides for all. A run saves after its last step and on a signal in any case.
    """
    keep_last: Length = 2
    """Newest checkpoints to keep; older ones are deleted."""
    keep_every: Steps = 0
    """Checkpoints of steps that this number divides are never deleted; 0:
    only the newest are kept.
    """
    asynchronous: bool = True
    """Write checkpoints while training continues;
    a step blocks only for the copy of its shards to host memory.
    """
    on_failure: Literal["warn", "fail"] = "warn"
    """After a failed save (a full disk): warn and continue, or end the run.
    A failed first or last save ends it.
    """
    upload_timeout_s: float = Field(default=300.0, gt=0, le=10**6)
    """Longest time for one file of a save to an object store, with all tries. Then that save is
    given up, and the run continues.
    """
    most_failed: Length = 5
    """Maximal number of consecutive saves to an object store that fail, the first one included; one
    more ends the run.
    """


class Watch(Section):
    """Checks during a run, and their consequences."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a NaN/Inf loss or gradient: end the run and name the origin (stop),
    or leave the step out (skip).
    """
    most_skipped: Length = 3
    """Maximal number of consecutive skipped steps; one more ends the run."""
    drift_every: Steps = 100
    """Steps between comparisons of replicated values; above 0, also before each checkpoint. 0:
    never.
    """
    mirror: bool = False
    """Keep the last two steps in host memory, on several nodes in that of the next one too, and replace
    a dead rank in place: the other processes stay, and at most one step that was complete is taken
    again. With ``launch.max_restarts`` only.
    """


WandbName = Annotated[str, Field(max_length=128)]


class Tracking(Section):
    """Outputs of metrics. ``metrics.jsonl`` is always written and is the reference."""

    log_every: Length = 1
    """Steps between lines on the console; ``metrics.jsonl`` has every step."""
    console: bool = True
    """Print the metrics of rank 0."""
    wandb: Literal["auto", "online", "offline", "off"] = "off"
    """Weights & Biases. auto: online with an API key and a network, otherwise offline."""
    project: str = ""
    """Project in Weights & Biases, experiment in MLflow. "": WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME,
    else meshwright.
    """
    entity: WandbName = ""
    """Team or user that owns the project in Weights & Biases. "": WANDB_ENTITY,
    else the account's default.
    """
    group: WandbName = ""
    """Group of runs in Weights & Biases. "": WANDB_RUN_GROUP, else none."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Tags of the run in Weights & Biases. []: those of WANDB_TAGS."""
    notes: Annotated[str, Field(max_length=10_000)] = ""
    """Description of the run in Weights & Biases. "": WANDB_NOTES."""
    sinks: tuple[Annotated[str, Field(pattern=r"^([\w.]+:\w+|tensorboard|mlflow)$")], ...] = ()
    """More sinks: tensorboard, mlflow, or functions ``module:function`` (config, directory)
    -> sink; docs/python.md.
    """
    trace_step: Steps = 5
    """Step after each start to record for `meshwright draw RUN`; the last step if there are fewer.
    0: none.
    """
    stragglers_every: Steps = 20
    """Steps between searches for a slow rank, link or gradient reduction,
    logged if found twice in a row. 0: never.
    """
    gpu_metrics: bool = True
    """Record utilization, memory, power, temperature and clock of the GPUs (NVML, extra ``gpu``);
    docs/cluster.md.
    """


class Launch(Section):
    """Ranks of one machine, hang limit, restarts;
    under torchrun or srun without ``processes`` and ``max_restarts``.
    """

    processes: Count | Literal["auto"] = "auto"
    """Number of local ranks. auto: dp x pp x cp x tp;
    with dp = "auto" one per device (on CPU pp x cp x tp).
    """
    devices: Annotated[str, Field(pattern=r"^([0-9]+(,[0-9]+)*)?$")] = ""
    """GPUs of the local ranks in order, as in nvidia-smi or positions in CUDA_VISIBLE_DEVICES. "":
    all, by PCI bus.
    """
    share_devices: bool = False
    """Let several ranks share a GPU (local rank i uses GPU i modulo their number), over gloo:
    for tests.
    """
    threads: Annotated[int, Field(gt=0, le=1024)] = 1
    """Threads of one rank on CPU (OMP_NUM_THREADS)."""
    timeout_s: Annotated[float, Field(gt=0, le=10**8)] = 600.0
    """Longest time without progress on a rank, before the run ends with a report of the ranks that
    wait for each other. Saving, a validation batch and a first step that compiles count as well.
    """
    cluster: str = Field(
        default="", description="the path of a TOML file, in the form of a run's links.toml"
    )
    """Expected performance of the cluster, with which `meshwright doctor` compares its
    measurements. "": none.
    """
    max_restarts: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Most restarts of a failed run from its newest checkpoint; 0: none.
    torchrun and srun have their own options.
    """
    # 1, as torchtitan's min_replica_size. There a smaller run has a smaller global batch; here each step
    # keeps its samples, so that fewer replicas cost time alone
    min_dp: Count = 1
    """Fewest replicas with which a run on several nodes goes on after it has lost a node and has no spare
    one; the global batch stays. `parallel.dp`: it ends instead. With `watch.mirror` only.
    """
    grow_after_s: Annotated[float, Field(ge=0, le=10**8)] = 60.0
    """Shortest time between a change of the number of replicas and the next planned one, when nodes for more
    of them have come. With `watch.mirror` only.
    """
