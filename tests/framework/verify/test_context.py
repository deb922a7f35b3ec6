"""Context parallelism gives the numbers of one process;
each mistake that loses them is seen and named.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright.context_parallel.plan
from meshwright.config import RunConfig
from meshwright.context_parallel import exchange, grouped
from meshwright.context_parallel.cut import HeadCut, SampleTokens, TokenCut
from meshwright.context_parallel.exchange import KeyScattering
from meshwright.current import CurrentMicrobatch
from meshwright.pipeline.recompute import RecomputeContext
from meshwright.pipeline.stage import Stage
from meshwright.seeding import SeededDropout
from meshwright.verify import Layout, parse_layout
from meshwright_launch.pool import RankPool
from meshwright_models import some_queries
from meshwright_models.attention import AttentionCore
from meshwright_models.rotary import Rotary
from tests.framework.verify.cases import LATER, References, config_of, problems_of, prove
from tests.support.marks import mark_all_rows_but, marked_rows
from tests.support.run import Break

LENGTH = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"num_kv_heads": 2, "ffn_size": 24, "sliding_window": 5},
    "decoder": {"num_kv_heads": 2, "ffn_size": 24, "rotary_share": 0.5},
    "llama, fused": {"num_kv_heads": 2, "ffn_size": 24, "dropout": 0.0},
    "gpt2, fused": {"dropout": 0.0},
}


def model(name: str, *, documents: bool) -> RunConfig:
    """Dropout everywhere, but for fused attention; documents of random lengths,
    which begin on and off the cuts.
    """
    options = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 4,
        "max_sequence_length": LENGTH,
    }
    options |= {"dropout": 0.1} | OPTIONS[name]
    data = {"train": "random", "sequence_length": LENGTH, "document_boundaries": documents}
    return config_of(f"meshwright_models.{name.split(',')[0]}:build", options, LENGTH, data=data)


LAYOUTS = [
    ("gpt2", False, "cp2"),
    ("llama", True, "cp4"),
    ("llama", True, "cp2,tp2,sequence"),
    ("gpt2", True, "cp2,pp2,zb_v"),
    ("llama", False, "cp2,zero3"),
    ("gpt2", True, "dp2,cp2,pp2,mbs2"),
    ("llama", True, "cp2,pp3,documents,mbs2,selective"),
    ("llama, fused", True, "cp2,pp2,zb_v,documents,mbs2"),
    ("llama, fused", False, "cp4,zero3"),
    LATER("gpt2, fused", True, "cp2,tp2,sequence,documents,full"),
    LATER("llama, fused", True, "cp2,pp2,selective"),
    LATER("gpt2, fused", True, "cp4,pp2,zb_v,selective,mbs2"),
    LATER("llama, fused", True, "cp4,zero3,full"),
    LATER("gpt2, fused", True, "cp2,heads,zero3"),
    ("llama", True, "cp2,pp2,heads,documents,mbs2"),
    ("gpt2", True, "cp2,tp2,sequence,heads"),
    LATER("gpt2", True, "cp4,heads"),
    LATER("gpt2", False, "cp2,heads,full"),
    LATER("llama", True, "cp2,pp2,zb_v,heads,selective"),
    LATER("llama", False, "cp2,zero3,heads"),
    LATER("gpt2", True, "dp2,cp2,pp2,heads,contiguous"),
    LATER("decoder", True, "cp2,heads,zero2"),
    ("gpt2", True, "cp2,tp2,sequence,documents,mbs2"),
    LATER("decoder", True, "cp4,documents,full"),
    LATER("llama", True, "cp2,pp2,zb_v,documents,mbs2"),
    LATER("gpt2", True, "dp2,cp2,zero3,documents"),
    LATER("llama", True, "cp2,pp2"),
    LATER("llama", True, "cp8,contiguous"),
    LATER("decoder", True, "cp2,tp2,zero2"),
    LATER("gpt2", True, "cp2,tp2,pp2,sequence,contiguous"),
    LATER("gpt2", False, "cp4,contiguous,full"),
    LATER("llama", True, "cp2,pp2,selective,zb_h1"),
    LATER("llama", False, "dp2,cp2,zero1,shard2"),
    LATER("gpt2", True, "dp2,cp2,zero3,shard2"),
    LATER("llama", True, "cp2,zero1,offload"),
    LATER("gpt2", False, "cp2,pp2,interleaved_1f1b,full"),
]


@marked_rows(
    "all_layouts",
    "gpt2-False-cp2",
    "llama-True-cp4",
    "llama-True-cp2,tp2,sequence",
    "gpt2-True-cp2,pp2,zb_v",
    "llama-False-cp2,zero3",
    "gpt2-True-dp2,cp2,pp2,mbs2",
    "llama-True-cp2,pp3,documents,mbs2,selective",
    "llama, fused-True-cp2,pp2,zb_v,documents,mbs2",
    "llama, fused-False-cp4,zero3",
    "gpt2-True-cp2,tp2,sequence,heads",
    "gpt2-True-cp2,tp2,sequence,documents,mbs2",
)
@pytest.mark.parametrize(("name", "documents", "layout"), LAYOUTS)
def test_layouts_agree(
    name: str, documents: bool, layout: str, pool: RankPool, references: References
) -> None:
    config, parsed = model(name, documents=documents), parse_layout(layout)
    row = prove(config, parsed, pool, references, global_batch=8, steps=2, twice=False)
    assert row.problems == []


PAIRS: list[Any] = [
    ({"optimizer": {"name": "muon"}}, {}, "cp2,tp2,sequence"),
    LATER({"optimizer": {"name": "muon"}}, {}, "dp2,cp2,zero3"),
    LATER({}, {"num_kv_heads": 1}, "cp2,tp2,sequence"),
    LATER({}, {"num_kv_heads": 1}, "cp2,tp4,zero2"),
    LATER({"adapter": {"rank": 2, "targets": ["block*.attention.qkv"]}}, {}, "cp2,tp2,zero2"),
    LATER({"optimizer": {"state_dtype": "bfloat16"}}, {}, "cp2,tp2,zero2"),
    LATER({"pipeline": {"offload_activations": ["block*"]}}, {}, "cp2,pp2"),
    LATER({"pipeline": {"offload_activations": ["block*"]}}, {"dropout": 0.0}, "cp4,pp2"),
    LATER({"parallel": {"cp_head_groups": 2}}, {"dropout": 0.0}, "cp2,pp2,documents"),
]


@pytest.mark.parametrize(("changes", "options", "layout"), PAIRS)
def test_beside_other_capabilities(
    changes: dict[str, dict[str, Any]],
    options: dict[str, Any],
    layout: str,
    pool: RankPool,
    references: References,
) -> None:
    config = model("llama", documents=True)
    config = config.replace(**changes, model={"options": dict(config.model.options) | options})
    row = prove(
        config, parse_layout(layout), pool, references, global_batch=8, steps=2, twice=False
    )
    assert row.problems == []


@pytest.mark.torture
def test_weights_after_ten_steps(pool: RankPool, references: References) -> None:
    for name, layout in (("gpt2", "cp2"), ("llama", "cp2,tp2,sequence")):
        row = prove(
            model(name, documents=True),
            parse_layout(layout),
            pool,
            references,
            global_batch=8,
            steps=10,
            twice=True,
        )
        assert row.problems == []


@pytest.mark.torture
def test_float32(pool: RankPool, references: References) -> None:
    row = prove(
        model("llama", documents=True),
        parse_layout("cp2"),
        pool,
        references,
        global_batch=8,
        steps=2,
        dtype="float32",
        twice=False,
    )
    assert row.problems == []


# ------------------------------------------------------------------------------------------------------------
# mistakes


def loss_times_cp(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a mean over cp ranks is scaled up again, though losses are sums."""
    begin = Stage.__init__

    def scaled(stage: Stage, spec: Any, *args: Any, **more: Any) -> None:
        begin(stage, spec, *args, **more)
        stage.label_scale *= 2

    patch.setattr(Stage, "__init__", scaled)


def places_from_the_local_length(patch: pytest.MonkeyPatch) -> None:
    """Queries count from 0 on every rank."""
    forward = AttentionCore.forward

    def local(core: AttentionCore, *args: Any, places: Tensor | None = None) -> Tensor:
        if places is not None:
            places = torch.arange(places.shape[1], device=places.device)[None]
        return forward(core, *args, places=places)

    patch.setattr(AttentionCore, "forward", local)


def angles_from_the_local_length(patch: pytest.MonkeyPatch) -> None:
    """Rotary positions count from 0 on every rank."""
    own_rows = meshwright.context_parallel.plan._own_rows

    def first(name: str, kind: str, cut: TokenCut, module: Any, args: Any, output: Any) -> Any:
        if isinstance(module, Rotary):
            return tuple(each.narrow(-2, 0, cut.share) for each in output)
        return own_rows(name, kind, cut, module, args, output)

    patch.setattr(meshwright.context_parallel.plan, "_own_rows", first)


def documents_shifted_at_a_cut(patch: pytest.MonkeyPatch) -> None:
    """Keys have the document of the token before them."""
    first_seen = some_queries.first_seen

    def shifted(places: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
        return first_seen(places, None if starts is None else starts.roll(1, -1), window)

    patch.setattr(some_queries, "first_seen", shifted)


def dropout_by_local_place(patch: pytest.MonkeyPatch) -> None:
    """Every rank draws the part of the mask that belongs to the first tokens."""
    mask = SeededDropout.mask

    def local(dropout: SeededDropout, shape: torch.Size, device: torch.device) -> Tensor:
        cut, dropout.cut = dropout.cut, None
        try:
            return mask(dropout, shape, device)
        finally:
            dropout.cut = cut

    patch.setattr(SeededDropout, "mask", local)


def keys_without_the_gradients_of_others(patch: pytest.MonkeyPatch) -> None:
    """Keys get the gradient of their own rank's queries alone."""

    def own(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.cut.take(dk, 2), ctx.cut.take(dv, 2), None

    patch.setattr(exchange._GatherKeys, "backward", staticmethod(own))


def keys_in_the_order_of_the_ranks(patch: pytest.MonkeyPatch) -> None:
    """Keys are used as they arrive."""
    patch.setattr(
        TokenCut, "from_ranks", lambda cut, device: torch.arange(cut.length, device=device)[None]
    )


def labels_rolled_over_the_cut(patch: pytest.MonkeyPatch) -> None:
    """Labels are made from a rank's own tokens: the last of them is that of its first."""
    take = TokenCut.take_labels
    patch.setattr(
        TokenCut, "take_labels", lambda cut, labels, tokens: take(cut, labels, tokens).roll(1, -1)
    )


def order_from_documents_shifted_by_one(patch: pytest.MonkeyPatch) -> None:
    """The second rank deals the tokens by starts that are one token late."""
    tokens_of = TokenCut.tokens_of

    def shifted(cut: TokenCut, inputs: Any, device: torch.device) -> SampleTokens | None:
        starts = inputs["starts"]
        return tokens_of(
            cut, {"starts": starts.roll(1, -1) if cut.group.rank == 1 else starts}, device
        )

    patch.setattr(TokenCut, "tokens_of", shifted)


def recompute_with_the_tokens_of_another_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Recompute restores the samples of the dropouts alone."""
    restored = RecomputeContext._restored

    def forgetful(context: RecomputeContext, then: CurrentMicrobatch) -> Any:
        @contextmanager
        def entered() -> Iterator[None]:
            with restored(context, replace(then, tokens=context.current.tokens)):
                yield

        return entered()

    patch.setattr(RecomputeContext, "_restored", forgetful)


def dropout_by_local_head(patch: pytest.MonkeyPatch) -> None:
    """Every rank draws the mask of the first heads."""

    def local(cut: HeadCut, device: torch.device, parts: int = 1) -> Tensor:
        return torch.arange(cut.length * parts // 2, device=device)[None]

    patch.setattr(HeadCut, "positions", local)


def window_left_out(patch: pytest.MonkeyPatch) -> None:
    """Queries of a rank see all keys of their document before them."""
    first_seen = some_queries.first_seen
    patch.setattr(
        some_queries, "first_seen", lambda places, starts, window: first_seen(places, starts, None)
    )


def stale_keys_in_backward(patch: pytest.MonkeyPatch) -> None:
    """Backward attends again with the keys that were gathered first."""
    again = grouped._backward_of_group
    first: list[Tensor] = []

    def stale(
        ctx: Any, q: Tensor, keys: Any, gradient: Tensor, dq: Any, group: int
    ) -> tuple[Tensor, Tensor]:
        if group == 0:
            first[:] = keys
        return again(ctx, q, (first[0], first[1]), gradient, dq, group)

    patch.setattr(grouped, "_backward_of_group", stale)


def gradients_of_the_wrong_heads(patch: pytest.MonkeyPatch) -> None:
    """Each group of heads gets the gradients of the keys of the one before."""
    wait = KeyScattering.wait
    last: list[Any] = []

    def late(scattering: KeyScattering) -> Any:
        last.append(wait(scattering))
        return last.pop(0) if len(last) > 1 else last[0]

    patch.setattr(KeyScattering, "wait", late)


LOSS, GRADIENTS = "loss of step 1 is", "gradients of step 1 differ"
INITIAL = "initial weights differ"
TRAPS: list[tuple[Break, str, tuple[str, ...], tuple[str, ...]]] = [
    (loss_times_cp, "cp2", (GRADIENTS, "it is 2 times the reference's"), (LOSS,)),
    (places_from_the_local_length, "cp2", (LOSS, GRADIENTS), (INITIAL,)),
    (angles_from_the_local_length, "cp2", (LOSS, GRADIENTS), (INITIAL,)),
    (documents_shifted_at_a_cut, "cp2", (LOSS, GRADIENTS), (INITIAL,)),
    (dropout_by_local_place, "cp2", (LOSS, GRADIENTS), (INITIAL,)),
    (keys_without_the_gradients_of_others, "cp2", (GRADIENTS,), (LOSS,)),
    (keys_in_the_order_of_the_ranks, "cp2", (LOSS, GRADIENTS), (INITIAL,)),
    (labels_rolled_over_the_cut, "cp2,contiguous", (LOSS, GRADIENTS), (INITIAL,)),
    (order_from_documents_shifted_by_one, "cp2,documents", (LOSS, GRADIENTS), (INITIAL,)),
    (
        recompute_with_the_tokens_of_another_microbatch,
        "cp2,pp2,documents,full",
        (GRADIENTS,),
        (LOSS,),
    ),
    (dropout_by_local_head, "cp2,heads", (LOSS, GRADIENTS), (INITIAL,)),
    (window_left_out, "cp2", (LOSS, GRADIENTS), (INITIAL,)),
    (stale_keys_in_backward, "cp4", (GRADIENTS,), (LOSS,)),
    (gradients_of_the_wrong_heads, "cp4", (GRADIENTS,), (LOSS,)),
]
FUSED = ("stale_keys_in_backward", "gradients_of_the_wrong_heads")
"""Mistakes of an attention without dropout, which is computed by groups of heads."""


@mark_all_rows_but(
    "all_layouts",
    "places_from_the_local_length",
    "angles_from_the_local_length",
    "documents_shifted_at_a_cut",
    "dropout_by_local_place",
    "keys_without_the_gradients_of_others",
    "keys_in_the_order_of_the_ranks",
    "gradients_of_the_wrong_heads",
)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap[0].__name__)
def test_verify_sees_the_mistake(
    trap: tuple[Break, str, tuple[str, ...], tuple[str, ...]],
    pool: RankPool,
    references: References,
) -> None:
    broken, layout, said, unsaid = trap
    name = "llama, fused" if broken.__name__ in FUSED else "llama"
    config = model(name, documents=True)
    told = "\n".join(problems_of(config, layout, broken, pool, references, global_batch=8, steps=1))
    for words in said:
        assert words in told, told
    for words in unsaid:
        assert words not in told, told


def test_words_of_a_layout() -> None:
    layout = parse_layout("dp2,cp4,contiguous")
    assert layout == Layout(dp=2, cp=4, order="contiguous") and layout.size == 8
    assert str(layout) == "dp2,pp1,tp1,cp4,1f1b,zero1,contiguous,mbs1"
    assert parse_layout(str(layout)) == layout
