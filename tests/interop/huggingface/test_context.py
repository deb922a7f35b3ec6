"""Context parallelism of transformers' models:
the numbers of one process and of the unmodified model's packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.context_parallel import plan as context
from meshwright.context_parallel.cut import HeadCut, TokenCut
from meshwright.errors import ModelError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.model.build import PlainModel, build_model
from meshwright.verify import compare, layout_config, parse_layout, verify
from meshwright.verify.rank import merge
from meshwright.verify.tolerance import TOLERANCES
from meshwright_interop.huggingface.restructure import frame
from meshwright_interop.huggingface.restructure.attention import (
    MaskRule,
    RegisteredAttention,
    install_cores,
    window_of,
)
from meshwright_interop.huggingface.restructure.float64 import keep_float64
from meshwright_interop.huggingface.restructure.frame import positions_of
from meshwright_interop.huggingface.restructure.places import at_places, own_arguments
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References
from tests.interop.huggingface.architectures import directory, run_config
from tests.interop.huggingface.test_restructure import unmodified
from tests.support.errors import has_code
from tests.support.marks import long_row, mark_all_rows_but
from tests.support.plain import plain_layers
from tests.support.run import run_broken

LATER = partial(pytest.param, marks=pytest.mark.all_layouts)
LENGTH = 24


def config_of(
    path: Path, *, documents: bool = True, attention: str | None = None, **sections: Any
) -> RunConfig:
    """A training with samples of documents, which begin on and off the cuts."""
    data = {"train": "random", "sequence_length": LENGTH, "document_boundaries": documents}
    options = {} if attention is None else {"attention": attention}
    return run_config(
        path, data=data, model={"builder": f"hf:{path}", "options": options}, **sections
    )


@pytest.mark.parametrize(
    ("kind", "documents", "attention", "layouts"),
    [
        long_row("qwen2", True, "sdpa", ("cp2,documents,mbs2", "cp2,tp2,sequence")),
        LATER(
            "qwen2",
            True,
            "sdpa",
            ("cp4", "cp2,heads", "cp2,pp2,zb_v", "cp2,zero3,contiguous", "dp2,cp2,pp2,full"),
        ),
        LATER("qwen2", False, "eager", ("cp2,tp2,sequence", "cp2,pp2,zb_v,heads", "cp2,zero3")),
        LATER("llama", False, None, ("cp2,pp2,zb_v", "cp2,heads,zero3", "cp4,contiguous")),
        LATER(
            "llama", True, "eager", ("cp2,pp2,zb_v,documents", "cp2,tp2,sequence", "cp2,heads,full")
        ),
        LATER(
            "mistral",
            True,
            "sdpa",
            ("cp2,tp2,sequence,documents", "cp2,pp2,zb_v,heads", "cp2,zero3"),
        ),
        LATER(
            "gemma2", True, "eager", ("cp2,pp2,zb_v,documents,mbs2", "cp2,heads", "cp2,tp2,zero3")
        ),
        LATER("gemma3_text", True, None, ("cp2,documents", "cp2,heads,pp2")),
        LATER("phi", True, None, ("cp2,tp2,sequence", "cp2,pp2,full")),  # dropouts
        LATER("mixtral", True, None, ("cp2", "cp2,pp2,documents")),
    ],
)
def test_layouts_agree(
    kind: str,
    documents: bool,
    attention: str | None,
    layouts: tuple[str, ...],
    tmp_path: Path,
    pool: RankPool,
) -> None:
    config = config_of(directory(kind, tmp_path), documents=documents, attention=attention)
    chosen = list(map(parse_layout, layouts))
    report = verify(config, chosen, pool, global_batch=8, steps=2, random_tokens=True)
    assert report.passed, report.table()


# ------------------------------------------------------------------------------- packed rows of the
# unmodified model


def samples() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, document starts and labels, each (2, S)."""
    ids = torch.randint(3, 67, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    starts = torch.zeros(2, LENGTH, dtype=torch.bool)
    starts[:, 0] = True
    starts[0, [5, 12, 13]] = starts[1, [1, 20]] = True
    return ids, starts, F.pad(ids[:, 1:], (0, 1), value=-100)


def on_a_rank(
    rank: int, cp: int, path: Path, attention: str, exchange: str, order: str
) -> tuple[Tensor, list[Tensor]]:
    """This rank's logits in the order of the samples, zeros elsewhere,
    and its part of each gradient.
    """
    mesh = open_mesh(Grid(cp=cp), "cpu")
    model = build_model(f"hf:{path}", {"attention": attention}, 1)
    ids, starts, labels = samples()
    cut = TokenCut(mesh.cp, order, labels, model.current)
    on_meta = {"tokens": ids.to("meta"), "starts": starts.to("meta")}
    head_cut = HeadCut(mesh.cp) if exchange == "heads" else None
    context.apply("hf", model.layers, model.plan, on_meta, cut, head_cut)
    model.current.tokens = cut.tokens_of({"starts": starts}, torch.device("cpu"))
    layers = plain_layers(model, torch.float64)
    logits = layers({"tokens": ids, "starts": starts})
    assert logits.shape == (2, LENGTH // cp, 67)
    own = cut.take_labels(labels)
    F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum").backward()  # type: ignore[no-untyped-call]
    places = cut.positions(torch.device("cpu")).expand(2, -1)
    whole = torch.zeros(2, LENGTH, 67, dtype=torch.float64)
    whole.scatter_(1, places[..., None].expand_as(logits), logits.detach())
    close_mesh(mesh)
    return whole, [
        parameter.grad for parameter in layers.parameters() if parameter.grad is not None
    ]


def packed(path: Path, attention: str) -> tuple[Tensor, list[Tensor]]:
    """Logits and gradients of transformers' model on packed rows,
    in the order of our parameters.
    """
    model = build_model(f"hf:{path}", {"attention": attention}, 1)
    layers = plain_layers(model, torch.float64)
    whole = unmodified(path, model, layers)
    whole.set_attn_implementation(attention)
    for parameter in whole.parameters():
        parameter.data = parameter.data.double()
    ids, starts, labels = samples()
    with keep_float64(torch.float64):
        logits = whole(input_ids=ids, position_ids=positions_of(starts), use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    names: Any = model.layers.names_in_transformers
    return logits.detach(), [
        whole.get_parameter(names[name]).grad for name, _ in layers.named_parameters()
    ]


@pytest.mark.parametrize(
    ("kind", "attention", "exchange", "order"),
    [
        ("gemma2", "eager", "keys", "documents"),
        LATER("qwen2", "sdpa", "heads", "zigzag"),
        LATER("mistral", "sdpa", "keys", "contiguous"),
        LATER("llama", "eager", "heads", "documents"),
    ],
)
def test_logits_and_gradients_are_those_of_packed_rows(
    kind: str, attention: str, exchange: str, order: str, tmp_path: Path, pool: RankPool
) -> None:
    """Softcaps, windows and grouped heads of the unmodified model,
    which finds documents where positions restart.
    """
    path = directory(kind, tmp_path)
    logits, gradients = packed(path, attention)
    found = pool.run(on_a_rank, 2, path, attention, exchange, order)
    torch.testing.assert_close(sum(each[0] for each in found), logits, rtol=1e-12, atol=1e-12)
    assert len(gradients) == len(found[0][1])
    for parts, expected in zip(
        zip(*(each[1] for each in found), strict=True), gradients, strict=True
    ):
        assert float((sum(parts) - expected).norm()) <= 1e-12 * float(expected.norm())


# ----------------------------------------------------------------------------------------------------------
# mistakes


def masks_of_the_first_places(patch: pytest.MonkeyPatch) -> None:
    """Queries count from 0 on every rank."""
    rows = MaskRule.rows
    patch.setattr(MaskRule, "rows", lambda rule, places: rows(rule, places - places[:, :1]))


def angles_of_other_places(patch: pytest.MonkeyPatch) -> None:
    """Rotary positions are those of other tokens."""
    cut = frame.own_arguments

    def other(arguments: Any, places: Tensor | None, size: Any) -> Any:
        return cut(arguments, None if places is None else places // 2, size)

    patch.setattr(frame, "own_arguments", other)


def heads_without_the_mask_of_documents(patch: pytest.MonkeyPatch) -> None:
    """With all tokens of some heads attention is causal over the whole sample."""
    patch.setattr(MaskRule, "is_plain", property(lambda rule: True))


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "masks": (masks_of_the_first_places, "cp2"),
    "angles": (angles_of_other_places, "cp2,documents"),
    "documents": (heads_without_the_mask_of_documents, "cp2,heads"),
}


@mark_all_rows_but("long", "documents")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_verify_sees_the_mistake(mistake: str, tmp_path: Path, pool: RankPool) -> None:
    config, layout = (
        config_of(directory("llama", tmp_path, num_hidden_layers=1)),
        parse_layout(MISTAKES[mistake][1]),
    )
    expected = References().expected(config, 4, 1, "float64")
    text = layout_config(config, layout, 4, "float64").model_dump_json()
    found = merge(pool.run(run_broken, layout.size, MISTAKES[mistake][0], text))
    told = "\n".join(
        compare(layout, found, None, expected.findings, TOLERANCES["float64"]).problems
    )
    assert "loss of step 1 is" in told and "gradients of step 1 differ" in told, told


# -----------------------------------------------------------------------------------------------------------
# refusals


def drawn(kind: str, place: Path, **parallel: Any) -> Any:
    config = config_of(directory(kind, place), parallel={"cp": 2, "dp": 1, **parallel})
    return draw_blueprint(resolve(config.replace(data={"document_boundaries": False})))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gpt2", r"no plan for a pipeline .* rules out parallel.cp = 2.*MW-RUN-004"),
        long_row(
            "olmo_hybrid",
            (
                r"block0.layer.linear_attn mixes or counts the tokens of a sample"
                r" .*convolution.*MW-CP-009"
            ),
        ),
    ],
)
def test_other_layers_are_refused(kind: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        drawn(kind, tmp_path)


@pytest.mark.long
def test_sinks_of_all_heads_have_no_exchange_of_heads(tmp_path: Path) -> None:
    """Each rank would need the sinks of its heads."""
    drawn("gpt_oss", tmp_path)
    with pytest.raises(
        ModelError,
        match=r"GptOssAttention .* takes s_aux \(4,\), values for all heads.*MW-INTEROP-137",
    ):
        drawn("gpt_oss", tmp_path, cp_exchange="heads")


def compiled(rank: int, cp: int, path: Path) -> float:
    """The loss of this rank's tokens, by compiled layers."""
    mesh = open_mesh(Grid(cp=cp), "cpu")
    model = build_model(f"hf:{path}", {}, 1)
    ids, starts, labels = samples()
    cut = TokenCut(mesh.cp, "zigzag", labels, model.current)
    context.apply(
        "hf", model.layers, model.plan, {"tokens": ids.to("meta"), "starts": starts.to("meta")}, cut
    )
    losses = []
    for compile_layer in (lambda layer: layer, partial(torch.compile, backend="eager")):
        value: Any = {"tokens": ids, "starts": starts}
        for layer in plain_layers(model, torch.float32):
            value = compile_layer(layer)(value)
        losses.append(F.cross_entropy(value.flatten(0, 1), cut.take_labels(labels).flatten()))
    losses[1].backward()
    close_mesh(mesh)
    return float(losses[1] - losses[0])


@pytest.mark.torture
def test_compiled_layers_run_on_places(tmp_path: Path, pool: RankPool) -> None:
    """torch.compile takes no layer whose configuration changes within its forward."""
    assert pool.run(compiled, 2, directory("qwen2", tmp_path, num_hidden_layers=1)) == [0.0, 0.0]


def test_masks_that_the_registry_did_not_create() -> None:
    core = RegisteredAttention(None)
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(
        ModelError, match=r"its mask is a Tensor that transformers' registry.*MW-INTEROP-137"
    ):
        core(q, q, q, torch.zeros(1, 1, 3, 3), core, {}, torch.arange(3)[None])
    rule = MaskRule("sdpa", {"kv_length": 3})
    with pytest.raises(
        ModelError,
        match=r"takes position_bias \(1, 2, 3, 3\), values for all queries and keys",
        check=has_code("MW-INTEROP-137"),
    ):
        core(q, q, q, rule, core, {"position_bias": torch.zeros(1, 2, 3, 3)}, torch.arange(3)[None])
    assert install_cores(nn.Sequential(nn.Linear(1, 1))) == []


def test_arguments_that_are_indexed_by_token() -> None:
    places = torch.tensor([[0, 3], [1, 2]])
    angles, positions = torch.randn(2, 1, 4, 6), torch.arange(4)[None]
    given = ((None, angles), {"position_ids": positions, "scale": torch.ones(3)})
    (_, cut), kwargs = own_arguments(given, places, (2, 4))
    assert torch.equal(cut, torch.stack([angles[0][:, [0, 3]], angles[1][:, [1, 2]]]))
    assert kwargs["position_ids"].tolist() == places.tolist() and kwargs["scale"].shape == (3,)
    assert torch.equal(at_places(angles, places[:1], 2), angles[:, :, [0, 3]])
    assert own_arguments(given, None, (2, 4)) is given
    # a mask, other samples, no sample
    for other in (torch.zeros(2, 1, 4, 4), torch.zeros(3, 4), torch.zeros(4)):
        with pytest.raises(ModelError, match="MW-INTEROP-138"):
            own_arguments(((None, other), {}), places, (2, 4))


def test_the_plan_names_the_cores(tmp_path: Path) -> None:
    model: PlainModel = build_model(f"hf:{directory('qwen2', tmp_path)}", {}, 1)
    assert model.plan["block*.layer.self_attn.attention_core"] == "context"
    assert model.plan["embedding"] == model.plan["block1"] == model.plan["head"] == "places"
    assert model.layers.get_submodule("block1.layer.self_attn.attention_core").window == 5


@pytest.mark.parametrize(
    ("fields", "layer", "own", "expected"),
    [
        ({"sliding_window": 7}, 0, {}, 7),  # mistral, which reads it from the configuration
        ({"sliding_window": None}, 0, {}, None),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7},
            0,
            {},
            None,
        ),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}, 1, {}, 7),
        ({"layer_types": ["sliding_attention"], "sliding_window": 7}, 0, {"sliding_window": 5}, 5),
        # qwen2, whose module has its layer's
        ({"sliding_window": 7}, 0, {"sliding_window": None}, None),
        ({"layer_types": ["chunked_attention"], "attention_chunk_size": 16}, 0, {}, 16),
    ],
)
def test_the_window_of_a_layer(
    fields: dict[str, Any], layer: int, own: dict[str, Any], expected: int | None
) -> None:
    module: Any = nn.Identity()
    module.config, module.layer_idx = SimpleNamespace(**fields), layer
    for name, value in own.items():
        setattr(module, name, value)
    assert window_of(module) == expected


def test_windows_of_the_layers_of_a_model(tmp_path: Path) -> None:
    """Estimates of attention take each layer's own."""
    windows = {}
    for kind in ("mistral", "gemma2"):
        model = build_model(f"hf:{directory(kind, tmp_path)}", {}, 1)
        cores = [each for each in model.layers.modules() if isinstance(each, RegisteredAttention)]
        windows[kind] = [core.window for core in cores]
    assert (
        all(windows["mistral"]) and len(set(windows["gemma2"])) == 2 and None in windows["gemma2"]
    )
