"""Models that declare no pipeline plan: cut at their module lists,
and proven equal before they are used.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import ModelError
from meshwright.model.build import build_model, configured_model
from meshwright.verify import parse_layout, verify
from meshwright_interop.huggingface.restructure.constants import MetaConstants
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_launch.pool import RankPool
from tests.interop.huggingface.architectures import directory, run_config
from tests.interop.huggingface.test_restructure import unmodified
from tests.support.errors import has_code
from tests.support.marks import marked_rows
from tests.support.plain import plain_layers

LATER = partial(pytest.param, marks=pytest.mark.all_layouts)
KINDS = (
    "opt",
    "gptj",
    "bert",
    "nemotron",
    "gpt_neo",
    "stablelm",
    "mamba",
    "bart",
    "rembert",
    "recurrent_gemma",
)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@marked_rows("long", "bloom", "mamba2", "marian")
@pytest.mark.parametrize(
    "kind", ["gpt2", "bloom", "falcon", "mamba2", "marian", *map(LATER, KINDS)]
)
def test_logits_are_bit_equal_to_those_of_the_unmodified_model(kind: str, tmp_path: Path) -> None:
    path = directory(kind, tmp_path)
    model = build_model(f"hf:{path}", {}, 1)
    layers = plain_layers(model, torch.float32).eval()
    whole = unmodified(path, model, layers).eval()
    ids = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(layers(ids), whole(input_ids=ids, use_cache=False).logits)


@marked_rows("long", "gpt2-layouts0")
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("gpt2", ("pp2",)),
        *[LATER(kind, ("dp2", "pp2", "dp2,pp2,full")) for kind in ("gpt2", *KINDS[1:])],
    ],
)
def test_every_layout_gives_the_numbers_of_one_process(
    kind: str, layouts: tuple[str, ...], tmp_path: Path, pool: RankPool
) -> None:
    """The dropouts of gpt2, one of them between its embeddings and its first block,
    are drawn alike everywhere.

    opt is left out: its key biases, which softmax cancels, are rounding error beyond the tolerance.
    """
    config = run_config(directory(kind, tmp_path))
    report = verify(
        config, list(map(parse_layout, layouts)), pool, global_batch=4, steps=2, random_tokens=True
    )
    assert report.passed, report.table()


def test_branches_on_constants_run_on_meta_and_branches_on_tokens_do_not() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    with MetaConstants():
        mask = torch.ones(2, 4, device="meta")
        assert (mask[:, 1:] == 1).all() and mask.sum().item() == 8
        mask[1, 2:] = 0
        assert (
            not mask.all()
            and mask[0].all()
            and int(torch.arange(4, device="meta")[None].max()) == 3
        )
        assert torch.ones_like(ids).all() and int(ids.new_full((2,), 7)[1]) == 7
        for unknown in (
            ids.sum(),
            torch.rand(1, device="meta"),
            torch.empty(1, device="meta"),
            mask.sum() + ids.sum(),
        ):
            with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
                unknown.item()
        mask[0].copy_(ids[0])
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            bool(mask.all())
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        torch.ones(2, device="meta").all().item()


@pytest.mark.parametrize("layouts", [LATER(("dp2,pp2", "dp2,tp2,zero3"))])
def test_muon_steps_the_projections_of_a_model_of_the_library(
    layouts: tuple[str, ...], tmp_path: Path, pool: RankPool
) -> None:
    """Separate q, k and v are a matrix each; embedding and head are not."""
    config = run_config(directory("llama", tmp_path), optimizer={"name": "muon"})
    matrices = configured_model(config).matrices
    assert {name.split(".")[-2] for name in matrices} == {
        *(f"{of}_proj" for of in "qkvo"),
        *PROJECTIONS,
    }
    assert all(rows == () for rows in matrices.values())
    report = verify(
        config, list(map(parse_layout, layouts)), pool, global_batch=4, steps=2, random_tokens=True
    )
    assert report.passed, report.table()


def test_layers_and_names(tmp_path: Path) -> None:
    model = build_model(f"hf:{directory('gpt2', tmp_path)}", {}, 1)
    assert list(model.layers._modules) == [
        "embedding",
        "block0",
        "block1",
        "block2",
        "ln_f",
        "head",
    ]
    assert [name for name, _ in model.layers.embedding.named_children()] == ["wte", "wpe", "drop"]
    assert model.tied == [("embedding.wte.weight", "head.lm_head.weight")]
    with pytest.raises(ModelError, check=has_code("MW-INTEROP-107")) as found:
        ids = torch.zeros(1, 4, dtype=torch.int64)
        plain_layers(model, torch.float32)({"tokens": ids, "starts": ids == 0})
    assert "MW-INTEROP-107" in str(found.value)


def changed_forward(what: str, self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    """GPT-2's forward, with one change between its blocks."""
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    places = kwargs.get("position_ids")
    places = (
        torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        if places is None
        else places
    )
    first = hidden = self.drop(self.wte(input_ids) + self.wpe(places))
    for index, block in enumerate(self.h):
        hidden = block(hidden)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        if what == "scaled" and index == 1:
            hidden = hidden * 0.5
    hidden = self.ln_f(hidden + first if what == "skip" else hidden)
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)


@pytest.mark.parametrize("what", ["nothing", "scaled", "skip"])
def test_a_value_that_crosses_a_block_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor goes from layer to layer: computations on it are carried over,
    a second tensor is not.
    """
    path = directory("gpt2", tmp_path)
    model = import_transformers().GPT2Model

    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return changed_forward(what, self, input_ids, **kwargs)

    monkeypatch.setattr(model, "forward", forward)
    if what == "skip":
        with pytest.raises(
            ModelError,
            check=has_code("MW-INTEROP-109"),
        ) as found:
            build_model(f"hf:{path}", {}, 1)
        assert "MW-INTEROP-109" in str(found.value)
        return
    built = build_model(f"hf:{path}", {}, 1)
    layers = plain_layers(built, torch.float32).eval()
    whole = unmodified(path, built, layers).eval()
    ids = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(0))
    assert torch.equal(layers(ids), whole(input_ids=ids, use_cache=False).logits)


@pytest.mark.long
def test_what_no_cut_can_be_derived_for(tmp_path: Path) -> None:
    def said(kind: str) -> str:
        with pytest.raises(ModelError) as found:
            build_model(f"hf:{directory(kind, tmp_path)}", {}, 1)
        return str(found.value)

    assert "its forward fails on meta tensors" in said("xlm")
    assert "MW-INTEROP-109" in said("cpmant")
    assert "times, not once" in said("fuyu")
