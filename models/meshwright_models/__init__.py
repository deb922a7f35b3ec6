"""Models in plain torch: no rank, no mesh, no framework import.
One process can train them as they are.

Bring your own in ten lines
---------------------------
A model is a function that returns an ``nn.Sequential`` of named elements; a pipeline is cut between
its elements::

    # my_package/my_model.py                          configs: [model]  builder = "my_package.my_model:build"
    def build(vocab_size: int, width: int, depth: int) -> nn.Sequential:
        model = nn.Sequential(OrderedDict(
            embedding=nn.Embedding(vocab_size, width),                   # token ids (B, S) int64 -> (B, S, D)
            **{f"block{i}": MyBlock(width) for i in range(depth)},       # (B, S, D) -> (B, S, D)
            head=nn.Linear(width, vocab_size, bias=False),               # (B, S, D) -> logits (B, S, V)
        ))
        model.sharding_plan = {"embedding": "vocab", "block*.up": "column", "block*.down": "row",
        "head": "vocab"} return model

Without a plan everything is replicated over tp, and dp and pp work. An element passes a tensor, or
a tuple or dict of tensors, to the next. Some of these may need no gradient, such as a mask for a
later element.

Attributes of the Sequential (plain and optional)
-------------------------------------------------
``sharding_plan``: fnmatch pattern of module names -> kind: how tp splits the module, or what cp and
ep do with it

    column     nn.Linear, by output rows            row       nn.Linear, by input columns; bias added after the sum
               nn.Embedding, by features            heads     acts on activations split over dim 1 (attention dropout)
    vocab      nn.Embedding or nn.Linear, by token  features  a dropout on activations split over the last dim
    column_whole, row_whole   nn.Linear, as column and row, around operations that cannot be split: a column_whole
               all-gathers its output, and a row_whole takes this rank's slice of a whole input
    uncut      a module with weights between these two (a norm over all heads)
    gather     under sequence parallelism this module's first input is all-gathered before it, instead of by its column
               linears: for a forward that takes the length of the sequence from its input
    sequence   output indexed by position: sequence and context parallelism take this rank's rows
    replicate  the default: the same on all tp ranks
    context    attention core, called with (q, k, v, ...), each (B, heads, tokens, d): under context parallelism with
               some queries, all keys, and the keyword ``places`` (1 or B, queries), their positions
    positions  outputs indexed by position, the number of tokens taken from the input
    (docs/long-context.md)
    places     called with the keyword ``places`` under context parallelism (docs/long-context.md)
    experts    forward(x, ids, weights), parameters with the experts in dim 0     router  forward(x) -> (ids, weights);
               both replicated over tp, and both treat each token by itself
               (docs/mixture-of-experts.md)
    a function (layer, tp_rank, tp) -> meshwright.SplitLayer   any other layer (docs/models.md, "Sharding rules")

``divisible``: pattern -> number of indivisible units (heads, key-value groups, blocks of gate and
up rows) along the
    split dim of that module. tp must divide it: a contiguous slice then holds whole units.
``shared_units``: pattern of column linears -> (rows of the parts of a unit, number of parts at the
end that a rank
    needs in full, attribute of the parent that counts within a unit). tp may then be a multiple of
    ``divisible``: the ranks share each unit (docs/models.md, "More tp ranks than key-value heads").
``matrices``: pattern of module or parameter names -> the matrices of a weight (of three dims: of
each index of dim 0),
    for an optimizer that steps each as a whole (Muon)

    (128, 64, 64)  rows of the parts of a unit that repeats along dim 0: each part, over all units,
    is one matrix
    ("columns", 64, 64)   the same along columns, of transposed weights of experts (E, inputs, outputs), in equal parts
    whole      one matrix: the default of weights of two dims, except embeddings and the last layer
    adamw      none: AdamW steps it element by element
``tied_weights``: tuples of parameter names that are one weight, the canonical one first.
``initialise(name, tensor)``: fills the whole tensor of that parameter from torch's default
generator. Without it the
    module's own ``reset_parameters`` is used.
``label_smoothing``, ``z_loss``: numbers, options of the default loss (cross-entropy) in training.
``loss_heads``: (shift of the labels, weight of the loss) of each logits in the tuple that the last
element returns:
    multi-token prediction.
``loss(output, labels)``: a loss of your own instead of the default: one number per label, zero
where it is -100.
``selective_recompute``: patterns of submodules that ``pipeline.recompute = "selective"``
recomputes.
``impossible``: {"tp", "cp" or "sequence": reason why the model does not support it}.
``parameter_groups``: list of {"names": patterns of parameter names, "learning_rate_factor": ..,
"eps_factor": ..,
    "weight_decay": .., "frozen": ..}; the first match counts. Factors of the configuration multiply
    with these.

Requirements on a splittable module
-----------------------------------
* A fused projection is laid out so that any contiguous run of units is complete: ``[q k v]`` per
  head, not all q first.
* Local head counts come from tensor shapes (``rearrange("b s (h d) -> b h s d", d=head_dim)``),
  never from the config.
* Dropout is an ``nn.Dropout`` module. Only then is its mask the same in every layout.
* Buffers are made in ``__init__`` on ``device="cpu"``: they stay real while the parameters are on
  the meta device.

``decoder.py``, ``gpt2.py``, ``llama.py`` and ``t5.py`` contain builders. All other files
are shared code.
"""
