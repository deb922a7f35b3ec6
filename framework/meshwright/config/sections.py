"""Sections of the configuration that describe the model, its data and its layout,
with the defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat

from meshwright.config.bounds import Count, Int64, Length, Share
from meshwright.config.functions import current_name


class Section(BaseModel):
    """A section of the configuration: frozen, and closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


class Run(Section):
    """Identity of the run. Running the same command again resumes ``directory/name``."""

    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description=(
            "letters, digits, dots, dashes and underscores, a letter or digit first: it names a"
            " directory"
        ),
    )
    """Name of the run, and of its directory below ``directory``."""
    directory: str = Field(default="runs", pattern=r"^[^\x00]+$", description="a path")
    """Folder of all runs."""
    seed: Int64 = 1234
    """Seed of the initial weights, of dropout and of the order of the samples."""
    start: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=8)]
        | None
    ) = Field(
        default=None,
        description=(
            'a run such as "runs/base" or "runs/base@9000", a checkpoint, a directory of Hugging'
            " Face, or a list of these"
        ),
    )
    """Weights that the run starts from: a run ("runs/base", or "runs/base@9000" for a step), a
    checkpoint, a model or adapter of Hugging Face. Read once, before step 1. Default: first values
    of the model.
    """
    start_names: dict[str, Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict,
        description='a table such as {"head.weight" = "embedding.weight", "block*.up" = "layers.*.up"}',
    )
    """Tensors of this model whose name is another in ``start``: name here -> name there."""
    start_new: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description='name patterns such as ["head.*"]'
    )
    """Name patterns of tensors that keep the initial values of this model, although ``start`` is
    given. Adapters beside a model that had none need no pattern.
    """
    start_unused: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description='name patterns such as ["mtp*"]'
    )
    """Name patterns of tensors of ``start`` that this model leaves out."""

    @property
    def starts(self) -> list[str]:
        """Return the sources of ``start``; [] without any."""
        if self.start is None:
            return []
        return [self.start] if isinstance(self.start, str) else self.start


FUNCTION = r"^[\w.]+:\w+$"
"""Pattern of ``package.module:function``."""


class ParameterGroup(Section):
    """Parameters, by name pattern, that are trained otherwise than the rest."""

    names: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    """Patterns of parameter names, such as ``block0.*`` or ``*.bias``."""
    learning_rate_factor: float = Field(default=1.0, ge=0)
    """Factor on the learning rate of every step."""
    eps_factor: float = Field(default=1.0, gt=0)
    """Factor on ``optimizer.eps``."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of the group. Default: ``optimizer.weight_decay`` for matrices,
    none for biases and norms.
    """
    frozen: bool = False
    """Do not train these parameters."""


class Model(Section):
    """Source of the model: ``builder(**options)`` returns an ``nn.Sequential``."""

    builder: Annotated[str, AfterValidator(current_name)] = Field(
        default="meshwright_models.gpt2:build",
        pattern=r"^([\w.]+:\w+|[\w-]+:.+)$",
        description=(
            'a module and a function in it, as in "my_package.my_module:build"; or "hf:" and a'
            " directory"
        ),
    )
    """Function that builds the model; or a directory with a model of Hugging Face transformers."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the builder, such as ``num_layers``."""
    parameter_groups: list[ParameterGroup] | Annotated[str, Field(pattern=FUNCTION)] = Field(
        default_factory=list,
        description=(
            'a list such as [{names = ["embedding.*"], learning_rate_factor = 0.1, weight_decay ='
            ' 0.0}, {names = ["*.bias"], frozen = true}], or a function of (name, shape) as'
            ' "my_package.my_module:group"'
        ),
    )
    """Groups of parameters with a learning-rate factor or weight decay of their own, or frozen; the
    first match counts.
    """
    attention: str | None = Field(
        default=None,
        pattern=FUNCTION,
        description='a module and a function in it, as in "my_package.kernels:attend"',
    )
    """Attention function in the place of the kernels of the model's attention cores;
    `docs/models.md` has its arguments. Default: none.
    """
    grow_vocabulary: bool = False
    """Let the vocabulary be larger than that of ``run.start``: its rows are taken, the new ones keep
    their initial values.
    """


class Adapter(Section):
    """Low-rank adapters (LoRA): ``base(x) + (alpha / rank) B(A(dropout(x)))``, the base frozen."""

    rank: int = Field(default=0, ge=0, le=10**6)
    """Rank of the adapters' matrices. 0: no adapters, all weights are trained."""
    alpha: PositiveFloat | None = None
    """Scale of the adapters, divided by ``rank``. Default: ``rank``, a factor of 1."""
    targets: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description='name patterns such as ["block*.attention.qkv", "block*.mlp.*"]',
    )
    """Name patterns of the linears and embeddings that get an adapter."""
    dropout: Share = 0.0
    """Dropout of an adapter's input."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial values of A: as in nn.Linear (uniform), or normal with standard deviation 1 / rank.
    B starts at zero.
    """
    dora: bool = False
    """Train a magnitude for each output beside the low-rank direction (weight-decomposed adapters).
    """


SetName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")]
"""Name of a validation corpus, in the names of its metrics."""


class WeightedCorpus(Section):
    """One corpus of a mixture."""

    path: str = Field(min_length=1)
    weight: PositiveFloat = 1.0
    """Sampling frequency relative to the other corpora."""


class DataStage(Section):
    """Corpus or mixture of the training samples from a step or sample of the run on,
    to the next stage.
    """

    train: str | Annotated[list[WeightedCorpus], Field(min_length=1)] = Field(min_length=1)
    """Training corpus, or a weighted mixture of several."""
    from_step: Length | None = None
    """First step of the stage; the first of the run is step 1."""
    from_samples: Length | None = None
    """Alternative to ``from_step``: number of the run's samples before the stage."""


class Data(Section):
    """Training data: a corpus in Megatron's ``.bin``/``.idx`` format, or a dataset of the user."""

    train: str | Annotated[list[WeightedCorpus], Field(min_length=1)] = Field(
        default="",
        description=(
            'the path of a .bin/.idx pair, without the suffix; or a list such as [{path = "a",'
            ' weight = 3}, {path = "b", weight = 1}]'
        ),
    )
    """Training corpus, or a weighted mixture of several."""
    stages: list[DataStage] = Field(
        default_factory=list,
        description=(
            'a list such as [{from_step = 9000, train = "c"}, {from_step = 9500, train = [{path ='
            ' "a", weight = 3}, {path = "b", weight = 1}]}], or with from_samples in place of'
            " from_step"
        ),
    )
    """Later stages of training, each from a step or sample on with another corpus or mixture
    than ``train``.
    """
    validation: (
        str
        | Annotated[dict[SetName, str | WeightedCorpus], Field(min_length=1, max_length=32)]
        | None
    ) = Field(
        default=None,
        description=(
            "the path of a .bin/.idx pair, without the suffix; or several by name, as {web = "
            '"runs/data/web/validation", code = {path = "runs/data/code/validation", weight = 2}}'
        ),
    )
    """Validation corpus, or several with a loss each, whose weighted mean is the validation loss.
    Default: no validation.
    """
    tokenizer: str | None = Field(default=None, description="the path of a tokenizer.json")
    """Tokenizer of a corpus that has none beside it,
    and of the text that `meshwright sample` reads and writes.
    """
    sequence_length: Length = 1024
    """Length of one sample."""
    eod_mask_loss: bool = False
    """Do not train on predicting the token after an end-of-document token."""
    packing: Literal["stream", "documents"] = "stream"
    """Samples are windows over all documents concatenated (stream),
    or as many whole documents as fit (documents).
    """
    document_boundaries: bool = False
    """Restart attention and positions at each document inside a sample."""
    task: Literal["causal", "span_corruption"] = "causal"
    """Training task: next-token prediction; or, for an encoder-decoder,
    reconstruction of masked spans.
    """
    builder: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:\w+$",
        description='a module and a function in it, as in "my_package.images:build"',
    )
    """Alternative to ``train``: a function of (split, **options) that returns a dataset,
    map-style or iterable.
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the dataset's builder."""
    collate: str | None = Field(
        default=None,
        pattern=FUNCTION,
        description='a module and a function in it, as in "my_package.text:collate"',
    )
    """Function of (list of samples) that returns (inputs, labels)
    with the samples along the first dim.
    """
    workers: int = Field(default=0, ge=0, le=16)
    """Threads of each rank that read and collate samples of the dataset ahead. 0: none."""
    processes: bool = False
    """Give each of these threads a process that runs the Python code of the dataset or
    of ``collate``.
    """

    @property
    def validation_sets(self) -> dict[str, WeightedCorpus]:
        """Return the validation corpora by name; a single one has the name ""."""
        if self.validation is None:
            return {}
        if isinstance(self.validation, str):
            return {"": WeightedCorpus(path=self.validation)}
        return {
            name: WeightedCorpus(path=each) if isinstance(each, str) else each
            for name, each in self.validation.items()
        }


class Batch(Section):
    """``global_batch = micro_batch_size x chunks x dp``: give two of global_batch,
    micro_batch_size and chunks.
    """

    micro_batch_size: Count | None = None
    """Samples of one micro-batch, the unit that moves through the pipeline."""
    chunks: Count | None = None
    """Micro-batches per replica and step (gradient accumulation)."""
    global_batch: Length | None = None
    """Samples of one step over all replicas."""
    balance: Literal["index", "work"] = "index"
    """Rows of a step that a replica and micro-batch gets. index: neighbours in the order of the run.
    work: dealt so that all see about equally many keys, where documents have mixed lengths; the step
    is the same up to rounding.
    """
    padding: Literal["keep", "trim"] = "keep"
    """Ends of rows that no label counts in. trim: each micro-batch is cut after its last label that
    counts, for causal models alone; the step is the same up to rounding.
    """
    ramp: tuple[Length, Length, Length] | None = Field(
        default=None, description="[start, increment, samples], as in [32, 32, 1000000]"
    )
    """Batch-size ramp: steps have ``start`` samples at first, and ``increment`` more at a time,
    evenly over the first ``samples`` of the run, until they have ``global_batch``. Chunks change,
    nothing else. Default: none.
    """


class Parallel(Section):
    """Degrees of the axes, and sharding of weights, gradients and optimizer state."""

    dp: Count | Literal["auto", -1] = "auto"
    """Data-parallel degree. auto or -1: number of ranks / (pp x cp x tp)."""
    pp: Count = 1
    """Pipeline-parallel degree."""
    tp: Count = 1
    """Tensor-parallel degree."""
    cp: Count = 1
    """Context-parallel degree: ranks that share the tokens of each sample.
    `docs/long-context.md` has the details.
    """
    cp_order: Literal["zigzag", "contiguous", "documents"] = "zigzag"
    """Tokens of a context-parallel rank. zigzag: two chunks, from the start and the end, so that
    causal attention costs all ranks the same. contiguous: one chunk. documents: blocks, dealt so
    that each rank sees about as many keys.
    """
    cp_exchange: Literal["keys", "heads"] = "keys"
    """Communication of attention under cp. keys: all-gather keys and values. heads (Ulysses):
    all-to-all, after which a rank has all tokens of 1/cp of its heads; cp x tp must divide the
    query and key-value heads.
    """
    cp_head_groups: Count | None = None
    """Groups of a tensor-parallel rank's key-value heads, whose keys and values are gathered, used
    and released one after the other, and again in backward; 1: all at once, and kept. Default: see
    `docs/long-context.md`.
    """
    ep: Count = 1
    """Expert-parallel degree: neighbouring ranks of a stage that share the experts of each layer,
    over tp, cp and dp. `docs/mixture-of-experts.md` has the details.
    """
    sequence: bool = False
    """Sequence parallelism: split activations between tensor-parallel regions along the sequence
    over tp.
    """
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage. Sharded over dp x cp: nothing (0), optimizer state (1), gradients too (2),
    weights too (3).
    """
    shard_factor: Count | None = None
    """Neighbouring replicas that shard among themselves (hybrid sharding); divides dp x cp.
    Default: dp x cp. Smaller: less traffic between nodes, more memory.
    """
    unit_layers: Count = 1
    """Consecutive layers of a stage whose weights zero = 3 gathers, and whose gradients it reduces,
    in one message. More: fewer and larger messages, more memory.
    """
    keep_gathered: bool | list[str] = Field(
        default=False, description="true for all layers, or name patterns of layers"
    )
    """Layers whose weights zero = 3 keeps from a forward to the next backward, which does not gather
    them again, such as ``["head"]``; true: all.
    """
    reduce: Literal["microbatch", "step"] | None = None
    """Reduce gradients per microbatch (a rank keeps its shard) or step. Default: step;
    with zero >= 2 microbatch.
    """
    offload: bool = False
    """CPU offload of the optimizer: update, state, master weights;
    with zero = 3 also of weights and gradients.
    """
    offload_directory: str | None = Field(
        default=None, min_length=1, description="the path of a folder on a fast disk"
    )
    """Folder of memory-mapped files for the offloaded memory, which may exceed the RAM; with zero =
    3 for the optimizer state only. Default: none, host memory.
    """
    bucket_bytes: Annotated[int, Field(gt=0, lt=2**63)] | None = None
    """Size of a gradient bucket: the message of one reduction. Default: 4 MiB x dp x cp, at least
    25 MiB; on CUDA (``auto``: with a 16-bit dtype) at least 160 MiB.
    """
    tp_across_nodes: bool = False
    """Allow a tensor-parallel group to straddle nodes (slow: its traffic is in every layer)."""
    ep_across_nodes: bool = False
    """Allow an expert-parallel group to straddle nodes."""

    @property
    def known_dp(self) -> int | None:
        """dp, or None while it depends on the number of ranks."""
        return None if self.dp == "auto" or self.dp == -1 else self.dp

    @property
    def degrees(self) -> tuple[int, int, int, int, int]:
        """Degrees (pp, dp, tp, cp, ep) of a resolved configuration,
        as :class:`~meshwright.mesh.grid.Grid` has them.
        """
        assert self.known_dp is not None, "resolve the configuration first"
        return self.pp, self.known_dp, self.tp, self.cp, self.ep

    @property
    def num_replicas(self) -> int:
        """Ranks with the same weights, of a resolved configuration."""
        return self.degrees[1] * self.cp

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that share each micro-batch: all of the job with dp = 1."""
        return self.pp * self.tp * self.cp

    @property
    def named_ranks(self) -> str:
        """Degrees besides dp as text: "pp 2 x tp 4"."""
        return f"pp {self.pp} x " + (f"cp {self.cp} x " if self.cp > 1 else "") + f"tp {self.tp}"


V_SCHEDULES = ("zb_v", "v_half", "v_min", "dualpipe_v")
"""Schedules with two stages per rank, placed in a V."""


def stages_per_rank(schedule: str, interleave: int | None) -> int:
    """Return the stages per pipeline rank; ``interleave`` None: the schedule's default."""
    return interleave or (2 if schedule in ("interleaved_1f1b", *V_SCHEDULES) else 1)


class Pipeline(Section):
    """Pipeline schedule, the partition into stages, and activation checkpointing."""

    schedule: (
        Literal[
            "1f1b",
            "gpipe",
            "interleaved_1f1b",
            "zb_h1",
            "zb_h2",
            "zb_v",
            "v_half",
            "v_min",
            "dualpipe_v",
        ]
        | Annotated[str, Field(pattern=FUNCTION)]
    ) = Field(
        default="1f1b",
        description=(
            '"1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min" or'
            ' "dualpipe_v"; or a function of (pp, chunks, num_stages) that returns rows of actions,'
            ' as "my_package.my_module:schedule"'
        ),
    )
    """Pipeline schedule; `docs/schedules.md` compares them. Or a function that returns its rows."""
    schedule_file: str | None = Field(default=None, description="the path of a schedule as text")
    """Schedule as a text file, instead of ``schedule``. Default: none."""
    interleave: Count | None = None
    """Stages per pipeline rank. Default: 2 for the schedules that need several, otherwise 1."""
    balance: Literal["time", "parameters", "layers"] | list[Count] = "time"
    """Measure that balances the stages; or the number of layers of each stage, first to last."""
    recompute: Literal["none", "pointwise", "selective", "full"] = "none"
    """Activation checkpointing (recompute) of norms and pointwise operations,
    ``selective_recompute``, or layers.
    """
    recompute_layers: list[str] = Field(default_factory=lambda: ["*"], min_length=1)
    """Name patterns of the layers to recompute, such as ``block1?``."""
    offload_activations: list[str] = Field(default_factory=list)
    """Name patterns of the layers whose tensors saved for backward lie in host memory meanwhile,
    such as ``block*``.
    """

    @property
    def stages_per_rank(self) -> int:
        """Stages per pipeline rank, with the schedule's default."""
        return stages_per_rank(self.schedule, self.interleave)
