"""What context parallelism refuses before any rank exists, and a user's own attention core."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.blueprint import Blueprint, draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.context_parallel import plan
from meshwright.context_parallel.cut import TokenCut
from meshwright.current import CurrentMicrobatch
from meshwright.errors import UserError
from meshwright.mesh.comm import Group
from meshwright.run.summary import summarise
from tests.support.errors import raises

LENGTH = 32


class Core(nn.Module):
    """Attention (B, H, Q, d) x (B, H, S, d) whose queries may be some of the tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor | None = None) -> Tensor:
        queries = torch.arange(k.shape[-2], device=k.device)[None] if places is None else places
        mask = torch.arange(k.shape[-2], device=k.device) <= queries[:, None, :, None]
        return (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1) @ v


class ForgetfulCore(nn.Module):
    """The same without the places of its queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Core()(q, k, v)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Two heads, and a dropout on their queries, keys and values."""

    def __init__(self, core: nn.Module, drops: float) -> None:
        super().__init__()
        self.qkv, self.core, self.dropout = nn.Linear(8, 24), core, nn.Dropout(drops)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.dropout(self.qkv(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + self.core(q, k, v).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]


@torch.library.custom_op("meshwright_test::compute_new_token", mutates_args=())
def next_token(x: Tensor) -> Tensor:
    """Return a kernel of somebody's own."""
    return x.roll(-1, 1)


@next_token.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("meshwright_test::normalised", mutates_args=())
def normalised(x: Tensor) -> Tensor:
    """Another one, of each token by itself."""
    return x / x.norm(dim=-1, keepdim=True)


@normalised.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


F = nn.functional
MIXERS: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), x.new_ones(8, 8, 3), padding=1).transpose(
        1, 2
    ),
    "mean": lambda x: x + x.mean(1, keepdim=True),
    "scan": lambda x: x.cumsum(1),
    "scan in place": lambda x: x.clone().cumsum_(1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "scores": lambda x: (x @ x.mT).softmax(-1) @ x,
    "shift": lambda x: x + F.pad(x[:, :-1], (0, 0, 1, 0)),
    "padded": lambda x: F.pad(x, (0, 0, 1, -1)),
    "places": lambda x: x * torch.arange(x.shape[1], device=x.device)[:, None],
    "fourier": lambda x: torch.fft.fft(x, dim=1).real,
    "pooling": lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "highest": lambda x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "median": lambda x: x - x.median(1, keepdim=True).values,
    "range": lambda x: x / x.aminmax(dim=1, keepdim=True).max,
    "deviation": lambda x: x / torch.std_mean(x, 1, keepdim=True)[0],
    "split": lambda x: x.split([1, x.shape[1] - 1], 1)[1].sum() + x,
    "windows": lambda x: x + F.pad(x, (0, 0, 1, 0)).unfold(1, 2, 1).amax(-1),
    "first": lambda x: x - x.unbind(1)[0].unsqueeze(1),
    "kernel": lambda x: torch.ops.meshwright_test.compute_new_token(x),
}
"""Ways in which a layer may see more than one token."""
ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "features": lambda x: x * x.sum(-1, keepdim=True).softmax(-1) + x.flatten(0, 1).view_as(x),
    "fourier": lambda x: torch.fft.fft(x, dim=-1).real,
    "pooling": lambda x: F.avg_pool1d(x, 3, 1, 1),
    "median": lambda x: (
        x - x.median(-1, keepdim=True).values + torch.std_mean(x, -1, keepdim=True)[0]
    ),
    "gate": lambda x: (
        F.glu(torch.cat([x, x.flip(-1)], -1)) + F.rms_norm(x, (8,)) + F.pad(x, (1, -1))
    ),
    "heads": lambda x: (
        x.unflatten(-1, (2, 4))
        .repeat_interleave(2, 2)
        .flatten(2)
        .chunk(2, -1)[0]
        .bfloat16()
        .float()
    ),
    "groups": lambda x: F.layer_norm(x.reshape(-1, 4), (4,)).view_as(x) + x.clone().clamp_(-1, 1),
    "chosen": lambda x: x.new_zeros(x.shape).scatter(-1, x.topk(2, -1).indices, 1.0) * x,
    "kernel": lambda x: torch.ops.meshwright_test.normalised(x),
}
"""Ways in which it does not."""


class Mixer(nn.Module):
    """A layer of one of these."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


CORES = {"core": Core, "forgetful": ForgetfulCore}


def own_model(
    plan: dict[str, str],
    *,
    core: str = "core",
    mixer: str = "",
    alone: str = "",
    by_frequency: bool = False,
) -> nn.Sequential:
    """Embedding, attention, head."""
    embedding = nn.Embedding(11, 8, scale_grad_by_freq=by_frequency)
    layers = [("embedding", embedding), ("attention", Attention(CORES[core](), 0.1))]
    if mixer == "scaled":
        layers.append(("mixer", Scaled()))
    elif mixer or alone:
        layers.append(("mixer", Mixer(MIXERS[mixer] if mixer else ALONE[alone])))
    model = nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(8, 11))]))
    model.sharding_plan = plan
    return model


PLAN = {"embedding": "vocab", "attention.core": "context"}


def config_of(builder: str, options: dict[str, Any], **data: Any) -> RunConfig:
    config = RunConfig.model_validate(
        {
            "model": {"builder": builder, "options": options},
            "data": {"train": "random", "sequence_length": LENGTH, **data},
            "batch": {"micro_batch_size": 1, "global_batch": 4},
            "train": {"dtype": "float32", "device": "cpu"},
            "parallel": {"cp": 2, "dp": 1},
        }
    )
    return resolve(config)


def own(
    plan: dict[str, str] | None = None, parallel: dict[str, Any] | None = None, **options: Any
) -> Blueprint:
    config = config_of(
        "tests.framework.context_parallel.test_plan:own_model",
        {"plan": PLAN if plan is None else plan, **options},
    )
    return draw_blueprint(config.replace(parallel=parallel or {}))


def heads(builder: str, options: dict[str, Any], **parallel: int) -> Blueprint:
    """Return one of our models with an exchange of heads."""
    config = config_of(f"meshwright_models.{builder}:build", options)
    return draw_blueprint(config.replace(parallel={"cp_exchange": "heads", **parallel}))


GPT2 = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "max_sequence_length": LENGTH,
}
LLAMA = {**GPT2, "num_kv_heads": 2, "ffn_size": 8}


def grouped(groups: int, **parallel: int) -> RunConfig:
    """Keys by so many groups of two key-value heads."""
    return config_of("meshwright_models.llama:build", LLAMA).replace(
        parallel={"cp_head_groups": groups, **parallel}
    )


def test_an_own_attention_core_needs_no_more_than_its_name() -> None:
    blueprint = own()
    assert blueprint.cut.share == LENGTH // 2
    # the loss is scaled by the labels of the whole sample
    assert blueprint.example.labels_per_sample == LENGTH
    layers = blueprint.model.layers.to("meta")
    assert layers(torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")).shape == (
        1,
        LENGTH // 2,
        11,
    )


@pytest.mark.parametrize(
    ("code", "draw"),
    [
        ("MW-CP-002", lambda: own({"embedding": "vocab"})),
        ("MW-CP-004", lambda: own({"attention.core": "context"})),  # tokens that nobody has cut
        ("MW-CP-008", lambda: own(core="forgetful")),
        ("MW-CP-003", lambda: own({**PLAN, "head": "sequence"})),
        ("MW-CP-010", lambda: own(parallel={"cp_order": "documents"})),  # which are not given
        ("MW-CP-012", lambda: heads("gpt2", {**GPT2, "num_heads": 1})),
        # 1 key-value head
        ("MW-CP-012", lambda: heads("llama", {**LLAMA, "num_heads": 4, "num_kv_heads": 2}, tp=2)),
        (
            "MW-CP-013",
            lambda: plan._give_heads(
                "core", own().cut, nn.Identity(), (), torch.zeros(1, LENGTH, 2, 4)
            ),
        ),
        ("MW-CP-014", lambda: draw_blueprint(grouped(3))),
        # a key-value head for each tp rank
        ("MW-CP-014", lambda: draw_blueprint(grouped(2, tp=2))),
        ("MW-CP-016", lambda: own(by_frequency=True)),
        ("MW-CP-015", lambda: own(parallel={"cp_head_groups": 2})),
        (
            "MW-CP-007",
            lambda: draw_blueprint(
                config_of("meshwright_models.llama:build", {**LLAMA, "mtp_layers": 1})
            ),
        ),
        (
            "MW-CP-002",
            lambda: draw_blueprint(
                config_of(
                    "meshwright_models.t5:build",
                    {"vocab_size": 99, "hidden_size": 8, "num_heads": 2},
                    task="span_corruption",
                )
            ),
        ),
    ],
)
def test_what_is_refused(code: str, draw: Any) -> None:
    with pytest.raises(UserError) as caught:
        draw()
    assert code in str(caught.value), str(caught.value)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_layer_that_mixes_tokens_is_refused_by_name(mixer: str) -> None:
    with raises("MW-CP-009", "own_model", "mixer"):
        own(mixer=mixer)
    with raises("MW-CP-009", "mixer"):  # shares of two tokens
        own({**PLAN}, {"cp": 16}, mixer=mixer)


@pytest.mark.parametrize("alone", ALONE)
def test_a_layer_that_takes_each_token_by_itself_is_not(alone: str) -> None:
    assert own(alone=alone).cut.share == LENGTH // 2
    own({**PLAN}, {"cp": 16}, alone=alone)


COUNTING = {
    "bias": {"router": "sigmoid", "balance": "bias"},
    "losses": {"sequence_loss": 0.1, "batch_loss": 0.1, "router_z_loss": 0.1},
    "capacity": {"capacity_factor": 1.5},
    "count": {"count_tokens": True},
}


@pytest.mark.parametrize("exchange", ["keys", "heads"])
@pytest.mark.parametrize("of", COUNTING)
def test_a_router_counts_the_tokens_of_all_ranks(of: str, exchange: str) -> None:
    """It is no layer that mixes tokens by itself: its sums and gathers go over the axis.
    Its buffers have values.
    """
    moe = {"num_experts": 4, "top_k": 2, **COUNTING[of]}
    config = config_of("meshwright_models.llama:build", {**LLAMA, "moe": moe})
    assert draw_blueprint(config.replace(parallel={"cp_exchange": exchange}))


class Scaled(nn.Module):
    """Features times a buffer that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_buffer_with_values_is_no_obstacle() -> None:
    assert own(mixer="scaled")


def test_with_an_exchange_of_heads_a_core_needs_no_places() -> None:
    layers = own(parallel={"cp_exchange": "heads"}, core="forgetful").model.layers.to("meta")
    assert layers(torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")).shape == (
        1,
        LENGTH // 2,
        11,
    )


@pytest.mark.parametrize("kind", ["sequence", "positions"])
def test_outputs_by_position_of_samples_that_are_cut_differently(kind: str) -> None:
    """A table of positions gets a dim of samples; a rotary that has none is refused,
    as is one of other samples.
    """
    current = CurrentMicrobatch()
    cut = TokenCut(Group("cp", (0, 1), 1), "documents", torch.zeros(2, LENGTH), current)
    starts = torch.zeros(2, LENGTH, dtype=torch.bool)
    starts[1, 9] = True
    tokens = cut.tokens_of({"starts": starts}, torch.device("cpu"))
    assert tokens is not None
    current.tokens, table = tokens, torch.randn(LENGTH, 3)
    module = nn.Identity()
    for whole in (table, table.expand(1, 5, LENGTH, 3), table.expand(3, 5, LENGTH, 3)):
        if whole.shape[0] == 3 or (whole.dim() == 2 and kind == "positions"):
            with raises("MW-CP-011"):
                plan._own_rows("rotary", kind, cut, module, (), whole)
        else:
            found = plan._own_rows("rotary", kind, cut, module, (), whole)
            rows = table[tokens.positions]
            assert torch.equal(
                found, rows if whole.dim() == 2 else rows[:, None].expand(2, 5, -1, 3)
            )


def test_a_length_that_cp_and_tp_do_not_divide_is_refused() -> None:
    config = config_of(
        "meshwright_models.gpt2:build", {**GPT2, "max_sequence_length": 10}, sequence_length=10
    )
    config = config.replace(parallel={"tp": 2, "sequence": True})
    with raises("MW-CP-006", "10 tokens", "parallel.cp = 2 x tp 2", "8 or 12"):
        draw_blueprint(config)


def test_the_summary_draws_the_tokens_of_each_rank() -> None:
    lines = summarise(own(), ["node0"] * 2).splitlines()
    assert lines[0] == "pp 1 x dp 1 x cp 2 x tp 1 = 2 ranks on 1 node of 2"
    assert "context parallel   1 group of 2, as ranks 0 1; each inside one node" in lines
    drawn = [line.split()[-1] for line in lines if " cp0  " in line or " cp1  " in line][-2:]
    assert drawn == ["########................########", "........################........"]
    assert any(
        "16 tokens per rank, zigzag: in one document the busiest has 0.0% more keys" in line
        for line in lines
    )


@pytest.mark.long
@pytest.mark.parametrize("order", ["zigzag", "documents"])
@pytest.mark.parametrize("exchange", ["keys", "heads"])
def test_a_dry_run_has_no_documents(order: str, exchange: str) -> None:
    """Each sample is one document: as many bytes and messages for all orders."""
    pytest.importorskip("meshwright_plan")
    from meshwright_plan.dryrun.fake_step import profile_rank

    config = config_of("meshwright_models.llama:build", LLAMA, document_boundaries=True)
    config = config.replace(parallel={"cp_order": order, "cp_exchange": exchange})
    assert (
        profile_rank(config, 1).both_bytes
        == profile_rank(config.replace(parallel={"cp_order": "contiguous"}), 1).both_bytes
    )
