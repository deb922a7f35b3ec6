"""Models whose builders give their weights values as public code does,
outside of ``reset_parameters``.
"""

from __future__ import annotations

import copy
import math
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from meshwright_models import llama

V, D, L = 24, 8, 2


class Block(nn.Module):
    """Pre-norm feed-forward block of GPT-2,
    whose last projection is scaled by the depth in some models.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(D)
        self.c_fc = nn.Linear(D, 4 * D)
        self.c_proj = nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c_proj(F.gelu(self.c_fc(self.ln(x))))


class Positions(nn.Module):
    """Token and position embeddings with parameters drawn in ``__init__``,
    as in vision transformers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, D)
        self.positions = nn.Parameter(torch.randn(1, 6, D) * 0.02)
        self.scale = nn.Parameter(1e-1 * torch.ones(D))
        nn.init.trunc_normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) * self.scale + self.positions[:, : ids.shape[1]]


class Masked(nn.Module):
    """Linear with a random constant mask, whose weight is zero where the mask is,
    as in masked networks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("mask", (torch.rand(D, D) > 0.5).float())
        with torch.no_grad():
            self.linear.weight *= self.mask

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.linear.weight * self.mask, self.linear.bias)


class Raw(nn.Module):
    """Scale of the features by a parameter from torch.empty; ``fill`` may give it values."""

    def __init__(self, fill: Callable[[Tensor], object] = lambda tensor: None) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(D))
        with torch.no_grad():
            fill(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Filled(nn.Module):
    """Module with a parameter that ``make`` returns, and that forward does not use."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.gain = nn.Parameter(make())

    def forward(self, x: Tensor) -> Tensor:
        return x


class Drawing(Raw):
    """Layer that draws random numbers in forward in three ways."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.rrelu(x * self.gain, training=True)
        x = x * torch.bernoulli(
            torch.full_like(x, 0.9),
        )
        noise = torch.rand_like(x)
        return x + noise


def many_problems() -> nn.Sequential:
    """Build a model with problems of several kinds."""
    model = assemble(Drawing(), Drawing(), Drawing(), nn.RReLU())
    model.wte.weight = model.head.weight
    return model


class PartlyReset(Raw):
    """Scale whose ``reset_parameters`` leaves elements out."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain[:3] = 1.0


class RawBuffer(nn.Module):
    """Shift of the features by a buffer from torch.empty,
    of which ``count`` elements get a value.
    """

    def __init__(self, count: int, *, persistent: bool = True) -> None:
        super().__init__()
        shift = torch.empty(D)
        shift[:count] = 0.1
        self.register_buffer("shift", shift, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Constant(nn.Module):
    """Linear with a constant buffer that ``make`` returns."""

    def __init__(self, make: Callable[[], Tensor], *, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("table", make(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def init_weights(module: nn.Module) -> None:
    """Initialise a module as nanoGPT does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, mean=0.0, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def assemble(*middle: nn.Module, embedding: nn.Module | None = None) -> nn.Sequential:
    """Build embedding, the layers ``middle`` and head."""
    names = [(f"h{i}", layer) for i, layer in enumerate(middle)]
    first = nn.Embedding(V, D) if embedding is None else embedding
    return nn.Sequential(
        OrderedDict([("wte", first), *names, ("head", nn.Linear(D, V, bias=False))])
    )


def nanogpt() -> nn.Sequential:
    """Build a GPT with nanoGPT's initialisation: ``apply``, a tie,
    and projections scaled by the depth.
    """
    model = assemble(*(Block() for _ in range(L)))
    model.wte.weight = model.head.weight
    model.tied_weights = [("wte.weight", "head.weight")]
    model.apply(init_weights)
    for name, parameter in model.named_parameters():
        if name.endswith("c_proj.weight"):
            nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * L))
    model.sharding_plan = {"h*.c_fc": "column", "h*.c_proj": "row", "wte": "vocab", "head": "vocab"}
    return model


def of_linear(change: Callable[[nn.Linear], object]) -> nn.Sequential:
    """Build a model whose first block's ``c_fc`` gets another value."""
    block = Block()
    with torch.no_grad():
        change(block.c_fc)
    return assemble(block, Block())


def copied() -> nn.Sequential:
    """Build a model whose blocks are copies of one that is initialised before."""
    block = Block()
    block.apply(init_weights)
    return assemble(*(copy.deepcopy(block) for _ in range(L)))


ORDER = ["h0", "h1"]


def in_order() -> nn.Sequential:
    """Build a model whose layers are drawn in ORDER, as in that of a set of names."""
    model = assemble(Block(), Block())
    for name in ORDER:
        model.get_submodule(name).apply(init_weights)
    return model


def from_another() -> nn.Sequential:
    """Build a model in which one weight is half of another."""
    model = assemble(Block(), Block())
    model.h1.c_fc.weight = nn.Parameter(model.h0.c_fc.weight.detach() * 0.5)
    return model


def assigned(linear: nn.Linear) -> None:
    """Assign ``.data``, which parameters on meta do not accept."""
    linear.weight.data = torch.randn(4 * D, D) * 0.1


def normalised(linear: nn.Linear) -> None:
    """Scale a weight by a number read from it."""
    linear.weight /= float(linear.weight.norm())


def by_numpy(linear: nn.Linear) -> None:
    """Draw from the global generators of numpy and Python."""
    linear.weight.copy_(torch.from_numpy(np.random.randn(4 * D, D)) * random.uniform(0.1, 0.2))


def of_meta() -> nn.Sequential:
    """Build the model on the meta device, and initialise it there."""
    with torch.device("meta"):
        model = assemble(Block(), Block())
        model.apply(init_weights)
    return model


def rest_of(std: float) -> Callable[[str, Tensor], None]:
    """Return an ``initialise`` that fills matrices only."""

    def initialise(name: str, tensor: Tensor) -> None:
        if tensor.dim() > 1:
            nn.init.normal_(tensor, std=std)

    return initialise


def halved(name: str, tensor: Tensor) -> None:
    """Divide the values that a tensor has by two."""
    tensor *= 0.5


def by_array(name: str, tensor: Tensor) -> None:
    """Write a tensor's values through numpy."""
    tensor.numpy()[...] = 0.25


def with_initialise(
    initialise: Callable[[str, Tensor], None], model: nn.Sequential
) -> nn.Sequential:
    """Give a model the attribute ``initialise``."""
    model.initialise = initialise  # type: ignore[assignment]
    return model


class Late(nn.Module):
    """Scale of the features that is reset, then set through the tensor that was registered."""

    def __init__(self) -> None:
        super().__init__()
        gain = nn.Parameter(torch.empty(D))
        self.gain = gain
        self.reset_parameters()
        nn.init.normal_(gain, mean=1.0, std=0.5)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def twice_registered() -> nn.Sequential:
    """Build a model whose embedding and head register one parameter, held in a variable."""
    model, weight = assemble(Block()), nn.Parameter(torch.randn(V, D) * 0.02)
    model.wte.weight = weight
    model.head.weight = weight
    return model


def cloned() -> nn.Sequential:
    """Build a model with torch's stack of copies of one layer, which are equal."""
    layer = nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True)
    return assemble(nn.TransformerEncoder(layer, L, enable_nested_tensor=False))


def experts() -> nn.Sequential:
    """Build a mixture of experts whose weights are all set after it is built,
    in place of its ``initialise``.
    """
    moe = {"num_experts": 4, "top_k": 2}
    sizes = {"hidden_size": 16, "num_layers": L, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24}
    model = llama.build(vocab_size=V, max_sequence_length=8, moe=moe, **sizes)
    del model.initialise
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            std = 0.05 / math.sqrt(2 * L) if name.endswith(("out.weight", "down.weight")) else 0.05
            nn.init.trunc_normal_(parameter, std=std)
    return model


def read(model: nn.Sequential) -> nn.Sequential:
    """Read values of parameters, so that the builder runs on the CPU."""
    model.wte.weight.sum().item()
    return model


def in_pieces(name: str, tensor: Tensor) -> None:
    """Fill the gains element by element."""
    if name.endswith("gain"):
        for i in range(len(tensor)):
            tensor[i] = i


def uneven_bias(linear: nn.Linear) -> None:
    """Draw a bias from a generator without a seed."""
    linear.bias.copy_(torch.from_numpy(np.random.default_rng().normal(size=4 * D)))


class Sparse(nn.Module):
    """Linear with a sparse constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("mixing", torch.eye(D).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def part_of(tensor: Tensor, count: int = 3) -> Tensor:
    """Fill the first elements of a tensor with ones."""
    tensor.view(-1)[:count] = 1
    return tensor


def grown(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of which only the first elements have a value, after it was enlarged."""
    return torch.zeros(3, dtype=dtype).resize_(D)


def set_beyond() -> Tensor:
    """Return a tensor that was set to more elements than its storage had."""
    values = torch.zeros(3)
    return torch.empty(0).set_(values.untyped_storage(), 0, (D,))  # type: ignore[call-overload]


def through_array(tensor: Tensor) -> Tensor:
    """Fill a tensor through numpy."""
    tensor.numpy()[...] = 1
    return tensor


def in_a_loop(tensor: Tensor) -> Tensor:
    """Fill a tensor element by element, in its first dim."""
    for i in range(len(tensor)):
        tensor[i] = i % 2
    return tensor


def triangle() -> Tensor:
    """Return a causal mask that is written into an empty tensor."""
    mask = torch.empty(D, D)
    torch.tril(torch.ones(D, D), out=mask)
    return mask


def of_constant(make: Callable[[], Tensor], *, is_read: bool = False) -> nn.Sequential:
    """Build a model with two constants, one of them left out of ``state_dict``."""
    model = assemble(Constant(make), Constant(make, persistent=False))
    return read(model) if is_read else model


LARGE = 5_000_000
"""Elements of a buffer that is not marked in the first run of a builder."""
UNWRITTEN: dict[str, Callable[[], Tensor]] = {
    **{
        str(dtype): partial(torch.empty, D, dtype=dtype)
        for dtype in (torch.int16, torch.uint8, torch.int8)
    },
    **{
        str(dtype): partial(torch.empty, D, dtype=dtype)
        for dtype in (torch.bool, torch.complex64, torch.complex128)
    },
    **{
        str(dtype): partial(torch.empty, D, dtype=dtype)
        for dtype in (torch.float8_e4m3fn, torch.uint16)
    },
    "large": lambda: torch.empty(LARGE),
    "large, partly": lambda: part_of(torch.empty(LARGE), LARGE - 1),
    "large bool": lambda: torch.empty(LARGE, dtype=torch.bool),
    "large, compared": lambda: torch.empty(LARGE) > 0,
    "large, as bools": lambda: torch.empty(LARGE).bool(),
    "partly uint8": lambda: part_of(torch.empty(D, dtype=torch.uint8)),
    "partly bool": lambda: part_of(torch.empty(D, D, dtype=torch.bool), D),
    "partly complex": lambda: torch.empty(D, dtype=torch.complex64).mul_(0).real,
    "view": lambda: torch.empty(3 * D)[D : 2 * D],
    "view of uint8": lambda: part_of(torch.empty(3 * D, dtype=torch.uint8))[2 * D :],
    "other dtype": lambda: torch.empty(4 * D, dtype=torch.uint8).view(torch.float32),
    "other integer": lambda: torch.empty(D).view(torch.int16),
    "transposed": lambda: torch.empty(D, 2, dtype=torch.int16).t(),
    "of another": lambda: torch.zeros(D, dtype=torch.uint8).new_empty(D),
    "like another": lambda: torch.empty_like(torch.zeros(D, dtype=torch.bool)),
    "strided": lambda: torch.empty_strided((D,), (2,), dtype=torch.int16),
    "permuted": lambda: torch.empty_permuted((D, 2), (1, 0), dtype=torch.int8),
    "old constructor": lambda: torch.ByteTensor(D),
    "constructor": lambda: torch.Tensor(D),
    "resized": grown,
    "resized uint8": lambda: grown(torch.uint8),
    "out": lambda: torch.empty(D, dtype=torch.bool, out=torch.zeros(2, dtype=torch.bool)),
    "set": set_beyond,
    "converted": lambda: torch.empty(D).to(torch.int16),
    "as bools": lambda: torch.empty(D).bool(),
    "integers as bools": lambda: torch.empty(D, dtype=torch.int16) != 0,
    "compared": lambda: torch.empty(D) > 0,
    "copied": lambda: torch.empty(D, dtype=torch.uint8).clone(),
    "copied deeply": lambda: copy.deepcopy(torch.empty(D, dtype=torch.uint8)),
    "copied into": lambda: torch.empty(D, dtype=torch.uint8).copy_(
        torch.empty(D, dtype=torch.uint8)
    ),
    "concatenated": lambda: torch.cat([torch.zeros(D).bool(), torch.empty(D, dtype=torch.bool)]),
}
"""Constants with elements that nothing has written, or that depend on such."""
WRITTEN: dict[str, Callable[[], Tensor]] = {
    "bool in place": lambda: torch.empty(D, D, dtype=torch.bool).fill_(True).triu_(1),
    "bool by rows": lambda: in_a_loop(torch.empty(D, D, dtype=torch.bool)),
    "uint8 by numpy": lambda: through_array(torch.empty(D, dtype=torch.uint8)),
    "copied": lambda: torch.empty(D, dtype=torch.int16).copy_(torch.arange(D)),
    "triangle": triangle,
    "loop": lambda: in_a_loop(torch.empty(D, dtype=torch.complex64)),
    "loop, float32": lambda: in_a_loop(torch.empty(D)),
    "drawn": lambda: torch.empty(D, dtype=torch.uint8).random_(0, 2),
    "large by numpy": lambda: through_array(torch.empty(LARGE)),
    "large bool by numpy": lambda: through_array(torch.empty(LARGE, dtype=torch.bool)),
    "large drawn in two": lambda: torch.cat(
        [half.normal_() for half in torch.empty(LARGE).chunk(2)]
    ),
    "not a number": lambda: torch.full((D,), float("nan")),
    "resized, then written": lambda: grown(torch.uint8).zero_(),
    "view of written": lambda: part_of(torch.empty(3 * D, dtype=torch.uint8), D)[:D],
    "from memory": lambda: torch.frombuffer(bytearray(range(D)), dtype=torch.uint8),
    "mask of zeros": lambda: torch.zeros(D, D, dtype=torch.bool),
}
"""Constants with values in all elements."""


def at_once(linear: nn.Linear) -> None:
    """Scale all parameters by one call."""
    torch._foreach_mul_([parameter.data for parameter in linear.parameters()], 0.5)


def unequal_runs(linear: nn.Linear) -> None:
    """Draw from a generator without a seed."""
    linear.weight.copy_(torch.from_numpy(np.random.default_rng().normal(size=(4 * D, D))))


def noise() -> float:
    """Return a number of the system, of 2^32."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


BUILDERS: dict[str, Callable[[], nn.Sequential]] = {
    "nanogpt": nanogpt,
    "vit": lambda: assemble(Block(), Block(), embedding=Positions()),
    "masked": lambda: assemble(Masked(), Block()),
    "copied": copied,
    "from another": from_another,
    "pretrained": lambda: assemble(
        Block(), embedding=nn.Embedding.from_pretrained(torch.randn(V, D), freeze=False)
    ),
    "xavier": lambda: of_linear(lambda linear: nn.init.xavier_uniform_(linear.weight)),
    "orthogonal": lambda: of_linear(lambda linear: nn.init.orthogonal_(linear.weight)),
    "data": lambda: of_linear(assigned),
    "normalised": lambda: of_linear(normalised),
    "numpy": lambda: of_linear(by_numpy),
    "seeded": lambda: of_linear(
        lambda linear: linear.weight.normal_(generator=torch.Generator().manual_seed(3))
    ),
    "parametrized": lambda: of_linear(parametrizations.weight_norm),
    "truncated": lambda: of_linear(lambda linear: nn.init.trunc_normal_(linear.weight, std=0.02)),
    "sparse": lambda: of_linear(lambda linear: nn.init.sparse_(linear.weight, 0.25)),
    "identity": lambda: of_linear(lambda linear: nn.init.eye_(linear.weight)),
    "dirac": lambda: of_linear(lambda linear: nn.init.dirac_(linear.weight[..., None])),
    "at once": lambda: of_linear(at_once),
    "late": lambda: assemble(Late(), Block()),
    "cloned": cloned,
    "copies of a reset": lambda: assemble(*(copy.deepcopy(block) for block in [Block()] * L)),
    "copies of own": lambda: assemble(
        *(copy.deepcopy(block) for block in [Raw(lambda gain: gain.fill_(2.0))] * L)
    ),
    "experts": experts,
    "twice registered": twice_registered,
    "filled": lambda: assemble(Raw(lambda gain: gain.fill_(2.0)), Block()),
    "infinite": lambda: assemble(Raw(lambda gain: gain.fill_(float("nan"))), Block()),
    "empty": lambda: assemble(Raw(), Raw(), Block()),
    "partly empty": lambda: assemble(Raw(lambda gain: gain[1:].fill_(1.0)), Block()),
    "empty buffer": lambda: assemble(RawBuffer(0), RawBuffer(0, persistent=False), Block()),
    "partly empty buffer": lambda: assemble(RawBuffer(3), Block()),
    "buffer": lambda: assemble(RawBuffer(D), Block()),
    "partly reset": lambda: assemble(PartlyReset(), Block()),
    "in order": in_order,
    "many problems": many_problems,
    "meta": of_meta,
    "generator": lambda: of_linear(unequal_runs),
    "time": lambda: of_linear(
        lambda linear: nn.init.normal_(linear.weight, std=time.perf_counter())
    ),
    "urandom": lambda: of_linear(
        lambda linear: linear.weight.fill_(noise() + float(linear.bias[0]))
    ),
    "resets": lambda: assemble(Block(), Block()),
    "rest": lambda: with_initialise(rest_of(0.05), assemble(Block(), Block())),
    "rest of own": lambda: with_initialise(rest_of(0.05), nanogpt()),
    "rest of raw": lambda: with_initialise(
        rest_of(0.05), assemble(Raw(lambda gain: gain.fill_(2.0)), Block())
    ),
    "rest of empty": lambda: with_initialise(rest_of(0.05), assemble(Raw(), Raw(), Block())),
    "sparse buffer": lambda: assemble(Sparse(), Block()),
    "sparse buffer, read": lambda: read(assemble(Sparse(), Block())),
    "empty, read": lambda: read(assemble(Raw(), Raw(), Block())),
    "partly empty buffer, read": lambda: read(assemble(RawBuffer(3), Block())),
    "rest of empty buffer, read": lambda: with_initialise(
        rest_of(0.05), read(assemble(RawBuffer(3), Block()))
    ),
    "rest of empty, read": lambda: with_initialise(
        rest_of(0.05), read(assemble(Raw(), Raw(), Block()))
    ),
    "in pieces, read": lambda: with_initialise(in_pieces, read(assemble(Raw(), Block()).double())),
    "array, read": lambda: with_initialise(by_array, read(assemble(Raw(), Block()))),
    "large parameter": lambda: assemble(Filled(lambda: part_of(torch.empty(LARGE))), Block()),
    "large parameter, read": lambda: read(
        assemble(Filled(lambda: part_of(torch.empty(LARGE))), Block())
    ),
    "large parameter in a loop": lambda: assemble(
        Filled(lambda: in_a_loop(torch.empty(2, LARGE))), Block()
    ),
    "large memory that is freed": lambda: assemble(
        Constant(lambda: torch.empty(LARGE) > 0), *(nn.Linear(D, D) for _ in range(8))
    ),
    "resized parameter": lambda: assemble(Filled(grown), Block()),
    "rest of unequal": lambda: with_initialise(rest_of(0.05), of_linear(unequal_runs)),
    "rest without unequal": lambda: with_initialise(rest_of(0.05), of_linear(uneven_bias)),
    **{f"unwritten {how}": partial(of_constant, make) for how, make in UNWRITTEN.items()},
    **{
        f"unwritten {how}, read": partial(of_constant, make, is_read=True)
        for how, make in UNWRITTEN.items()
    },
    **{f"written {how}": partial(of_constant, make) for how, make in WRITTEN.items()},
    **{
        f"written {how}, read": partial(of_constant, make, is_read=True)
        for how, make in WRITTEN.items()
    },
    "halved": lambda: with_initialise(halved, assemble(Block(), Block())),
    "by array": lambda: with_initialise(by_array, assemble(Raw(), Block())),
}


def build(how: str) -> nn.Sequential:
    """Build a model of BUILDERS."""
    return BUILDERS[how]()
