"""Configuration schema: one frozen pydantic model per section, with the defaults.

``tests/config/test_every_key_is_read.py`` fails for a field without a reader. Units are in the names. ``load`` makes a
:class:`RunConfig` from a TOML file and overrides; ``resolve`` adds the values that depend on the number of ranks. Error
messages derive the allowed values from types and bounds; ``description`` adds facts that those do not express.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat

from meshwright.config.bounds import Count, Int64, Length, Share, Steps
from meshwright.config.functions import current_name


class Section(BaseModel):
    """A section of the configuration: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


class Run(Section):
    """Identity of the run. Running the same command again resumes ``directory/name``."""

    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="letters, digits, dots, dashes and underscores, a letter or digit first: it names a directory",
    )
    """Name of the run, and of its directory below ``directory``."""
    directory: str = Field(default="runs", pattern=r"^[^\x00]+$", description="a path")
    """Folder of all runs."""
    seed: Int64 = 1234
    """Seed of the initial weights, of dropout and of the order of the samples."""


class Model(Section):
    """Source of the model: ``builder(**options)`` returns an ``nn.Sequential``."""

    builder: Annotated[str, AfterValidator(current_name)] = Field(
        default="meshwright.models.gpt2:build",
        pattern=r"^([\w.]+:\w+|hf:.+)$",
        description='a module and a function in it, as in "my_package.my_module:build"; or "hf:" and a directory',
    )
    """Function that builds the model; or a directory with a model of Hugging Face transformers."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the builder, such as ``num_layers``."""


class Weighted(Section):
    """One corpus of a mixture."""

    path: str = Field(min_length=1)
    weight: PositiveFloat = 1.0
    """Sampling frequency relative to the other corpora."""


class Data(Section):
    """Training data: a corpus in Megatron's ``.bin``/``.idx`` format, or a dataset of the user."""

    train: str | Annotated[list[Weighted], Field(min_length=1)] = Field(
        default="",
        description='the path of a .bin/.idx pair, without the suffix; or a list such as [{path = "a", weight = 3}, '
        '{path = "b", weight = 1}]',
    )
    """Training corpus, or a weighted mixture of several."""
    validation: str | None = Field(default=None, description="the path of a .bin/.idx pair, without the suffix")
    """Validation corpus. Default: no validation."""
    tokenizer: str | None = Field(default=None, description="the path of a tokenizer.json")
    """Tokenizer of a corpus that has none beside it, and of the text that `meshwright sample` reads and writes."""
    sequence_length: Length = 1024
    """Length of one sample."""
    eod_mask_loss: bool = False
    """Do not train on predicting the token after an end-of-document token."""
    packing: Literal["stream", "documents"] = "stream"
    """Samples are windows over all documents concatenated (stream), or as many whole documents as fit (documents)."""
    document_boundaries: bool = False
    """Restart attention and positions at each document inside a sample."""
    task: Literal["causal", "span_corruption"] = "causal"
    """Training task: next-token prediction; or, for an encoder-decoder, reconstruction of masked spans."""
    builder: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:\w+$",
        description='a module and a function in it, as in "my_package.images:build"',
    )
    """Alternative to ``train``: a function of (split, **options) that returns a map-style dataset."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the dataset's builder."""


class Batch(Section):
    """``global_batch = micro_batch_size x chunks x dp``: give any two of the three."""

    micro_batch_size: Count | None = None
    """Samples that go through the pipeline at once."""
    chunks: Count | None = None
    """Micro-batches per replica and step (gradient accumulation)."""
    global_batch: Length | None = None
    """Samples of one step over all replicas."""


class Parallel(Section):
    """Degrees of the axes, and sharding of weights, gradients and optimizer state."""

    dp: Count | Literal["auto", -1] = "auto"
    """Data-parallel degree: the number of replicas. auto or -1: number of ranks / (pp x tp)."""
    pp: Count = 1
    """Pipeline-parallel degree."""
    tp: Count = 1
    """Tensor-parallel degree."""
    sequence: bool = False
    """Sequence parallelism: split activations between tensor-parallel regions along the sequence over tp."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage. Sharded over dp: nothing (0), optimizer state (1), gradients too (2), weights too (3)."""
    shard_factor: Count | None = None
    """Neighbouring replicas that shard among themselves (hybrid sharding); divides dp. Default: dp. Smaller: less
    traffic between nodes, more memory."""
    reduce: Literal["microbatch", "step"] | None = None
    """Reduce gradients per microbatch (a rank keeps its shard) or step. Default: step; with zero >= 2 microbatch."""
    offload: bool = False
    """CPU offload of the optimizer: update, state, master weights; with zero = 3 also of weights and gradients."""
    offload_directory: str | None = Field(default=None, min_length=1, description="the path of a folder on a fast disk")
    """Folder of memory-mapped files for the offloaded memory, which may exceed the RAM; with zero = 3 for the optimizer
    state only. Default: none, host memory."""
    bucket_bytes: Annotated[int, Field(gt=0, lt=2**63)] | None = None
    """Size of a gradient bucket: the message of one reduction. Default: 25 MiB, or 4 MiB per replica if more."""
    tp_across_nodes: bool = False
    """Allow a tensor-parallel group to straddle nodes (slow: its traffic is in every layer)."""

    @property
    def known_dp(self) -> int | None:
        """dp, or None while it depends on the number of ranks."""
        return None if self.dp == "auto" or self.dp == -1 else self.dp

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Degrees (pp, dp, tp) of a resolved configuration, as :class:`~meshwright.mesh.grid.Grid` takes them."""
        assert self.known_dp is not None, "resolve the configuration first"
        return self.pp, self.known_dp, self.tp


class Pipeline(Section):
    """Pipeline schedule, the partition into stages, and activation checkpointing."""

    schedule: Literal["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min"] = "1f1b"
    """Pipeline schedule; `docs/schedules.md` compares them."""
    schedule_file: str | None = Field(default=None, description="the path of a schedule as text")
    """Schedule as a text file, instead of ``schedule``. Default: none."""
    interleave: Count | None = None
    """Stages per pipeline rank. Default: 2 for the schedules that need several, otherwise 1."""
    balance: Literal["time", "parameters", "layers"] | list[Count] = "time"
    """Measure that balances the stages; or the number of layers of each stage, first to last."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing (recompute) of nothing, of modules that the model lists (selective), or of layers."""
    recompute_layers: list[str] = Field(default_factory=lambda: ["*"])
    """Name patterns of the layers to recompute, such as ``block1?``."""

    @property
    def stages_per_rank(self) -> int:
        """Stages per pipeline rank, with the schedule's default."""
        several = ("interleaved_1f1b", "zb_v", "v_half", "v_min")
        return self.interleave or (2 if self.schedule in several else 1)


class Optimizer(Section):
    """Optimizer, gradient clipping and learning-rate schedule."""

    name: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    """Optimizer. adamw8bit stores both moments of matrices in 8 bits: 2 bytes per element instead of 8."""
    learning_rate: PositiveFloat = 3e-4
    """Highest learning rate, reached after the warm-up."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay of the learning rate after the warm-up; wsd is warmup-stable-decay."""
    warmup_steps: Steps = 0
    """First steps, in which the learning rate rises linearly."""
    decay_steps: Steps = 0
    """Last steps, in which the learning rate falls; wsd only."""
    decay_until: Steps = 0
    """Step at which the decay ends, before or after the last one; 0: the last. Later steps have min_learning_rate."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW."""
    block_size: int = Field(default=256, ge=8, le=10**6, multiple_of=8)
    """Elements per scale in adamw8bit. A matrix whose rows it does not divide stays in 32 bits."""
    momentum: Share = 0.9
    """Momentum of SGD; 0: SGD has no state."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices. Parameters with one dimension (biases, norms) are never decayed."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Bound on the global gradient norm; 0 turns clipping off."""


class Train(Section):
    """Length of training, precision, device and validation."""

    steps: Length = 100
    """Optimizer steps of the run."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Precision of the computation; with bfloat16 the master weights stay in float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. auto: GPUs if torch sees one, else the CPU."""
    compile: bool = False
    """Apply torch.compile to each layer on its own."""
    validate_every: Steps = 0
    """Steps between validations; 0: only after the last step, if there is validation data."""
    validate_steps: Length = 8
    """Global batches in one validation."""
    callbacks: tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...] = ()
    """Functions ``module:function`` that take the parts of a rank and return an observer; docs/python.md."""


class Checkpoint(Section):
    """Times of saving. Resuming needs no key: the same command again continues the run."""

    every: Steps = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: Length = 2
    """Newest checkpoints to keep; older ones are deleted."""
    keep_every: Steps = 0
    """Checkpoints of steps that this number divides are never deleted; 0: only the newest are kept."""
    asynchronous: bool = True
    """Write checkpoints while training continues; a step blocks only for the copy of its shards to host memory."""
    on_failure: Literal["warn", "fail"] = "warn"
    """If a checkpoint cannot be written (a full disk): warn and continue, or end the run. The last always ends it."""


class Watch(Section):
    """Checks during a run, and their consequences."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a NaN/Inf loss or gradient: end the run and name the origin (stop), or leave the step out (skip)."""
    most_skipped: Length = 3
    """Maximal number of consecutive skipped steps; one more ends the run."""
    drift_every: Steps = 100
    """Steps between comparisons of values that several ranks replicate; 0: never. Each checkpoint compares them too."""


class Tracking(Section):
    """Outputs of metrics. ``metrics.jsonl`` is always written and is the reference."""

    log_every: Length = 1
    """Steps between lines on the console; ``metrics.jsonl`` has every step."""
    console: bool = True
    """Print the metrics of rank 0."""
    wandb: Literal["auto", "online", "offline", "off"] = "off"
    """Weights & Biases. auto: online with an API key and a network, otherwise offline."""
    project: str = "meshwright"
    """Project in Weights & Biases."""
    sinks: tuple[Annotated[str, Field(pattern=r"^([\w.]+:\w+|tensorboard)$")], ...] = ()
    """More sinks: tensorboard, or functions ``module:function`` (config, directory) -> sink; docs/python.md."""
    trace_step: Steps = 5
    """Step after each start to record for `meshwright draw RUN`; the last step if there are fewer. 0: none."""
    stragglers_every: Steps = 20
    """Steps between reports of stragglers: the slow rank, link or gradient reduction, if there is one. 0: never."""


class Launch(Section):
    """Local ranks that ``meshwright train`` starts when no launcher has started it."""

    processes: Count | Literal["auto"] = "auto"
    """Number of local ranks. auto: dp x pp x tp; with dp = "auto" one per device (on CPU pp x tp)."""
    devices: Annotated[str, Field(pattern=r"^(\d+(,\d+)*)?$")] = ""
    """GPUs: "2,0" gives local rank 0 the first, by nvidia-smi or position in CUDA_VISIBLE_DEVICES. "": all, by bus."""
    threads: Annotated[int, Field(gt=0, le=1024)] = 1
    """Threads of one rank on CPU (OMP_NUM_THREADS)."""
    timeout_s: Annotated[float, Field(gt=0, le=10**8)] = 600.0
    """Longest time without progress on a rank, before the run ends with a report of the ranks that wait for each other.
    Saving, a validation batch and a first step that compiles count as well."""
    cluster: str = Field(default="", description="the path of a TOML file, in the form of a run's links.toml")
    """Expected performance of the cluster, with which `meshwright doctor` compares its measurements. "": none."""
    max_restarts: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Restarts of a failed run from its newest checkpoint. torchrun and srun have their own options."""


class RunConfig(Section):
    """Configuration of one run. Frozen; ``resolved.json`` in the run directory parses back to an equal object."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    batch: Batch = Batch()
    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    watch: Watch = Watch()
    tracking: Tracking = Tracking()
    launch: Launch = Launch()

    def replace(self, **sections: Mapping[str, Any]) -> RunConfig:
        """Return a copy with other values, which are not validated: ``replace(train={"device": "cpu"})``."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)
