"""What can be configured: one frozen dataclass-like model per section, and the defaults.

Each field is read somewhere (``tests/config/test_every_key_is_read.py`` walks the tree and fails for one that nobody
reads), each unit is in its name. ``load`` makes a :class:`RunConfig` from a TOML file and overrides; ``resolve`` fills
in what follows from the number of ranks. What a field allows is told to people from its type and bounds;
``description`` is for what those do not tell.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat

from meshwright.config.functions import current_name

# NOTE [bounds of whole numbers]: the manifest of a checkpoint holds whole numbers below 2**63 (checkpoint/manifest).
# Every whole number here has an upper bound below that, and so has every product that a checkpoint records:
# train.steps x batch.global_batch is at most 10**18. A new key of whole numbers takes one of these types.
Count = Annotated[int, Field(gt=0, le=10**6)]
"""Of ranks, micro-batches, samples: what is written out, one by one, must end."""
Length = Annotated[int, Field(gt=0, le=10**9)]
Steps = Annotated[int, Field(ge=0, le=10**9)]
"""A number of steps that may be none."""
Int64 = Annotated[int, Field(ge=0, lt=2**63)]
"""What TOML, a manifest and a tensor of int64 can hold."""
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A section of the configuration: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


class Run(Section):
    """Who this run is. The same command again resumes ``directory/name``."""

    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="letters, digits, dots, dashes and underscores, a letter or digit first: it names a directory",
    )
    directory: str = Field(default="runs", pattern=r"^[^\x00]+$", description="a path")
    seed: Int64 = 1234


class Model(Section):
    """Where the ``nn.Sequential`` comes from: ``builder(**options)``."""

    builder: Annotated[str, AfterValidator(current_name)] = Field(
        default="meshwright.models.gpt2:build",
        pattern=r"^([\w.]+:\w+|hf:.+)$",
        description='a module and a function in it, as in "my_package.my_module:build"; or "hf:" and a directory',
    )
    options: dict[str, Any] = Field(default_factory=dict)


class Weighted(Section):
    """One of several corpora."""

    path: str = Field(min_length=1)
    weight: PositiveFloat = 1.0
    """How often samples of it are drawn, relative to the others."""


class Data(Section):
    """The corpus: a Megatron ``.bin``/``.idx`` pair is named by its path without the suffix; or a user's dataset."""

    train: str | Annotated[list[Weighted], Field(min_length=1)] = Field(
        default="",
        description='the path of a .bin/.idx pair, without the suffix; or a list such as [{path = "a", weight = 3}, '
        '{path = "b", weight = 1}]',
    )
    validation: str | None = Field(default=None, description="the path of a .bin/.idx pair, without the suffix")
    tokenizer: str | None = None
    sequence_length: Length = 1024
    eod_mask_loss: bool = False
    """Do not train on predicting the token after an end-of-document token."""
    packing: Literal["stream", "documents"] = "stream"
    """How samples are cut: windows over all documents one after the other; or whole documents, as many as fit."""
    document_boundaries: bool = False
    """Attention and positions begin anew with each document in a sample."""
    task: Literal["causal", "span_corruption"] = "causal"
    """What is asked of the corpus: the next token; or, of an encoder-decoder, the spans that were taken out."""
    builder: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:\w+$",
        description='a module and a function in it, as in "my_package.images:build"',
    )
    """Instead of ``train``: a function of (split, **options) that returns any map-style dataset of (inputs, labels)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the dataset's builder."""


class Batch(Section):
    """``global_batch = micro_batch_size x chunks x dp``, in samples: give any two of the three."""

    micro_batch_size: Count | None = None
    chunks: Count | None = None
    global_batch: Length | None = None


class Parallel(Section):
    """The degrees of the axes, and what each does. ``dp = "auto"`` (or -1): what the ranks allow."""

    dp: Count | Literal["auto", -1] = "auto"
    pp: Count = 1
    tp: Count = 1
    sequence: bool = False
    """Sequence parallelism: activations between tensor-parallel regions are split along the sequence over tp."""
    zero: Literal[0, 1, 2, 3] = 1
    """0: plain all-reduce, every replica steps all weights. 1: optimizer state and step sharded over dp. 2: gradients
    too. 3: weights too, gathered layer by layer as they are needed."""
    shard_factor: Count | None = None
    """Over how many neighbouring replicas these are sharded; each group of so many holds all of them. It divides dp.
    Left out: all of dp. Fewer: less traffic between nodes, more memory (hybrid sharding)."""
    reduce: Literal["microbatch", "step"] | None = None
    """When gradients are summed over the replicas: ``"step"``, once, and until then each rank keeps the whole gradient;
    ``"microbatch"``, after each, and it keeps its shard. Left out: ``"microbatch"`` from zero = 2 on."""
    offload: bool = False
    """What the optimizer keeps (its states, float32 weights) lies in the host's memory, and it steps there; with
    zero = 3 the shards of weights and gradients do, too."""
    offload_directory: str | None = Field(default=None, min_length=1, description="the path of a folder on a fast disk")
    """That memory is mapped to files here, so that it may be more than there is; with zero = 3 that of the states."""
    bucket_bytes: Annotated[int, Field(gt=0, lt=2**63)] | None = None
    """Of gradients that are summed over the replicas in one message. Left out: 25 MiB or, if that is more, 4 MiB for
    each replica: a message goes around in as many steps as there are replicas, and each of them has to be worth it."""
    tp_across_nodes: bool = False
    """Allow a tensor-parallel group to straddle nodes (slow: its traffic is in every layer)."""


class Pipeline(Section):
    """The order in which a replica's micro-batches go through the stages, and where the stages are cut."""

    schedule: Literal["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min"] = "1f1b"
    schedule_file: str | None = Field(default=None, description="the path of a schedule as text")
    """A schedule of one's own, instead of ``schedule``."""
    interleave: Count | None = None
    """Stages of one pipeline rank; left out: 2 for the schedules that need several, otherwise 1."""
    balance: Literal["time", "parameters", "layers"] | list[Count] = "time"
    """What a stage's share is measured in; or the number of layers of each stage, first to last."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is not kept for backward but computed again: nothing, what the model names, or whole layers."""
    recompute_layers: list[str] = Field(default_factory=lambda: ["*"])
    """Patterns of the layers that this holds for, such as ``block1?``."""

    @property
    def stages_per_rank(self) -> int:
        """The interleave as it is meant."""
        several = ("interleaved_1f1b", "zb_v", "v_half", "v_min")
        return self.interleave or (2 if self.schedule in several else 1)


class Optimizer(Section):
    """What steps the weights, gradient clipping and the learning rate as a function of the step."""

    name: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    """adamw8bit keeps both moments of matrices in 8 bits: 2 bytes of each element instead of 8."""
    learning_rate: PositiveFloat = 3e-4
    min_learning_rate: float = Field(default=0.0, ge=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: Steps = 0
    decay_steps: Steps = 0
    """Only for wsd: the number of last steps in which the learning rate falls."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Of AdamW, as is eps."""
    eps: PositiveFloat = 1e-8
    block_size: int = Field(default=256, ge=8, le=10**6, multiple_of=8)
    """Of adamw8bit: elements that are scaled together. Matrices whose rows it does not divide stay in 32 bits."""
    momentum: Share = 0.9
    """Of SGD; 0: it keeps nothing."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Only on matrices: parameters of one dimension (biases, norms) are never decayed."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Bound on the norm of the whole model's gradient; 0 turns clipping off."""


class Train(Section):
    """How long, in which precision, on what."""

    steps: Length = 100
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    """torch.compile each layer on its own."""
    validate_every: Steps = 0
    """Steps between validations; 0: only after the last step (if there is validation data)."""
    validate_steps: Length = 8
    """Global batches in one validation."""


class Checkpoint(Section):
    """When to save; resuming needs no key: the same command again goes on."""

    every: Steps = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: Length = 2
    keep_every: Steps = 0
    """Checkpoints of steps that this divides are never deleted; 0: only the newest stay."""
    asynchronous: bool = True
    """Train on while a checkpoint is written: a step waits only for a copy in host memory, of what its rank writes."""
    on_failure: Literal["warn", "fail"] = "warn"
    """When one cannot be written (a full disk): go on with a warning, or end the run. The last one always ends it."""


class Watch(Section):
    """What is looked for while a run goes on, and what happens then."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite: the run ends and names where it began; or this step is left out."""
    most_skipped: Length = 3
    """Steps in a row that are left out; one more ends the run."""
    drift_every: Steps = 100
    """Steps between comparisons of what several ranks hold alike, which are also made before each checkpoint; 0: none
    at all."""


class Tracking(Section):
    """What is told to whom. ``metrics.jsonl`` is always written: it is the truth."""

    log_every: Length = 1
    console: bool = True
    wandb: Literal["auto", "online", "offline", "off"] = "off"
    """auto: online with a key and a network, otherwise offline."""
    project: str = "meshwright"
    trace_step: Steps = 5
    """Which step after each start is measured span by span, for `meshwright draw RUN`; its last one if it has fewer; 0:
    none. A run that resumes is measured again."""
    stragglers_every: Steps = 20
    """After so many steps each it is said who makes the others wait, if somebody does: a rank, a link, the sums over
    replicas; 0: never."""


class Launch(Section):
    """The local ranks that ``meshwright train`` starts when no launcher has started it."""

    processes: Count | Literal["auto"] = "auto"
    """auto: dp x pp x tp; with dp = "auto" as many devices as there are (on CPU pp x tp)."""
    devices: Annotated[str, Field(pattern=r"^(\d+(,\d+)*)?$")] = ""
    """GPUs of this machine, as in "2,0": local rank 0 takes the first. Of those that CUDA_VISIBLE_DEVICES leaves, if it
    is set. "": all, in the order of the bus."""
    threads: Annotated[int, Field(gt=0, le=1024)] = 1
    """Threads of one rank on CPU (OMP_NUM_THREADS)."""
    timeout_s: Annotated[float, Field(gt=0, le=10**8)] = 600.0
    """For how long nothing may move on a rank: longer is a hang, and ends the run with who waits for whom. A save, a
    validation batch or a first step that compiles counts like anything else."""
    cluster: str = ""
    """A TOML file that says what the cluster has, in the form of a run's links.toml: `meshwright doctor` holds what it
    measures against it."""
    max_restarts: Annotated[int, Field(ge=0, le=10**6)] = 0
    """How often `meshwright train` starts a run that failed again by itself, from its newest checkpoint; torchrun and
    srun have their own ways."""


class RunConfig(Section):
    """One run, whole. Frozen; ``resolved.json`` in the run directory parses back to an equal object."""

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
