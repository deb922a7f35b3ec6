"""Models of transformers as layers: the numbers of the unmodified model,
in one process and in any layout.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.model.build import PlainModel, build_model, configured_model
from meshwright.verify import parse_layout, verify
from meshwright.verify.initial import initial_problems
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_launch.pool import RankPool
from tests.interop.huggingface.architectures import directory, run_config
from tests.support.errors import has_code
from tests.support.marks import long_row, marked_rows
from tests.support.plain import plain_layers

LATER = partial(pytest.param, marks=pytest.mark.all_layouts)
FAST = ("qwen3", "gemma2", "olmo2", "granite")
KINDS = (
    "llama",
    "mistral",
    "qwen2",
    "gemma",
    "gemma3_text",
    "olmo",
    "olmo3",
    "phi",
    "phi3",
    "gpt_neox",
    "starcoder2",
    "cohere",
    "cohere2",
    "helium",
    "smollm3",
    "glm",
    "glm4",
    "exaone4",
)


def unmodified(path: Path, model: PlainModel, layers: nn.Sequential) -> Any:
    """The model as transformers itself builds it, with the same weights."""
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names = model.layers.names_in_transformers
    assert isinstance(names, dict)
    states = {
        names[name]: parameter.detach()
        for name, parameter in layers.named_parameters(remove_duplicate=False)
    }
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    # a router's bias
    parameters |= {name: buffer for name, buffer in whole.named_buffers() if name in states}
    assert states.keys() == parameters.keys(), (
        "every parameter has one name there, and each of theirs is one here"
    )
    for name, parameter in parameters.items():
        parameter.data.copy_(states[name])
    return whole


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        name: p.grad
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }


@pytest.mark.parametrize("kind", [*FAST, *map(LATER, KINDS)])
def test_logits_loss_and_gradients_are_those_of_the_unmodified_model(
    kind: str, tmp_path: Path
) -> None:
    path = directory(kind, tmp_path)
    model = build_model(f"hf:{path}", {}, 1)
    layers = plain_layers(model, torch.float32).eval()  # dropouts draw other masks by design
    whole = unmodified(path, model, layers).eval()
    ids = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    logits, theirs = layers(ids), whole(input_ids=ids, labels=ids)
    assert torch.equal(logits, theirs.logits)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    ours, expected = gradients(loss, layers), gradients(theirs.loss, whole)
    names = model.layers.names_in_transformers
    assert isinstance(names, dict) and {names[name] for name in ours} == expected.keys()
    for name, gradient in ours.items():
        assert (
            float((gradient - expected[names[name]]).norm()) <= 1e-6 * float(gradient.norm()) + 1e-9
        ), name


def test_float64_is_float64_throughout(tmp_path: Path) -> None:
    """Norms and softmaxes are cast to float32 by their code:
    what 1e-7 of a weight changes would drown.
    """
    layers = plain_layers(
        build_model(f"hf:{directory('gemma2', tmp_path)}", {}, 1), torch.float64
    ).eval()
    ids = torch.randint(3, 67, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = layers(ids)
        layers.get_parameter("block0.layer.self_attn.q_proj.weight").mul_(1 + 1e-7)
        first = layers(ids) - before
        layers.get_parameter("block0.layer.self_attn.q_proj.weight").mul_(1 + 1e-7)
        second = layers(ids) - before
    assert float(first.norm()) > 0 and torch.allclose(second, 2 * first, rtol=1e-4, atol=1e-14)


LAYOUTS = ("dp2", "pp2", "tp2", "tp4", "pp2,tp2", "tp2,sequence", "dp2,pp2,full")


@marked_rows("long", "qwen3-layouts0", "gemma2-layouts1")
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("qwen3", ("pp2,tp2,sequence",)),
        ("gemma2", ("dp2,pp2",)),
        *[LATER(kind, LAYOUTS) for kind in (*FAST, *KINDS)],
    ],
)
def test_every_layout_gives_the_numbers_of_one_process(
    kind: str, layouts: tuple[str, ...], tmp_path: Path, pool: RankPool
) -> None:
    path = directory(kind, tmp_path)
    wanted = [parse_layout(text) for text in layouts]
    impossible = build_model(f"hf:{path}", {}, 1).impossible
    possible = [each for each in wanted if not (each.sequence and "sequence" in impossible)]
    report = verify(run_config(path), possible, pool, global_batch=4, steps=2, random_tokens=True)
    assert report.passed, report.table()


@pytest.mark.parametrize(
    ("kind", "layout"), [long_row("qwen3", "tp2,sequence"), LATER("llama", "pp2,tp4")]
)
def test_more_ranks_than_key_value_heads(
    kind: str, layout: str, tmp_path: Path, pool: RankPool
) -> None:
    path, chosen = directory(kind, tmp_path, num_key_value_heads=1), parse_layout(layout)
    assert set(build_model(f"hf:{path}", {}, 1).shared_units) == {
        f"block*.layer.self_attn.{n}_proj" for n in "kv"
    }
    report = verify(run_config(path), [chosen], pool, global_batch=4, steps=2, random_tokens=True)
    assert report.passed, report.table()


@pytest.mark.long
def test_weights_of_each_head_that_the_plan_leaves_out(tmp_path: Path, pool: RankPool) -> None:
    """phi's plan does not know its norms of q and k: each rank's gradient is of its own heads,
    and the sum is taken.
    """
    path = directory("phi", tmp_path, qk_layernorm=True)
    model = build_model(f"hf:{path}", {}, 1)
    assert model.plan["block*.layer.self_attn.q_layernorm"] == "heads"
    report = verify(
        run_config(path), [parse_layout("tp2")], pool, global_batch=4, steps=2, random_tokens=True
    )
    assert report.passed, report.table()


def test_the_layers_carry_what_the_plans_say(tmp_path: Path) -> None:
    model = build_model(f"hf:{directory('qwen3', tmp_path, tie_word_embeddings=True)}", {}, 1)
    assert list(model.layers._modules) == [
        "embedding",
        "block0",
        "block1",
        "block2",
        "norm",
        "head",
    ]
    assert model.tied == [("embedding.embed_tokens.weight", "head.lm_head.weight")]
    assert (
        model.plan["block*.layer.self_attn.q_proj"] == "column"
        and model.plan["head.lm_head"] == "vocab"
    )
    assert model.plan["block*.layer.self_attn.q_norm"] == "heads"
    assert model.plan["block*.layer.mlp"] == model.plan["block*.layer.self_attn"] == "gather"
    assert model.shared_units == {
        "block*.layer.self_attn.k_proj": ((8,), 1, "num_key_value_groups"),
        "block*.layer.self_attn.v_proj": ((8,), 1, ""),
    }
    assert model.divisible == {
        f"block*.layer.self_attn.{n}_proj": u for n, u in zip("qkvo", (4, 2, 2, 4), strict=True)
    }
    gathered = build_model(f"hf:{directory('olmo2', tmp_path)}", {}, 1)
    assert gathered.plan["block*.layer.self_attn.o_proj"] == "row_whole"
    assert gathered.plan["block*.layer.self_attn.k_norm"] == "uncut"


def test_first_values_are_the_model_s_own_rule_drawn_by_name(tmp_path: Path) -> None:
    path = directory("qwen2", tmp_path, initializer_range=0.5)
    first, again = (build_model(f"hf:{path}", {}, 1) for _ in range(2))
    weight = first.initial("block1.layer.mlp.up_proj.weight")
    assert 0.45 < float(weight.std()) < 0.55
    assert torch.equal(weight, again.initial("block1.layer.mlp.up_proj.weight"))
    assert not torch.equal(weight, first.initial("block2.layer.mlp.up_proj.weight"))
    assert not torch.equal(
        weight, build_model(f"hf:{path}", {}, 2).initial("block1.layer.mlp.up_proj.weight")
    )
    assert torch.equal(first.initial("block0.layer.self_attn.q_proj.bias"), torch.zeros(32))
    assert torch.equal(first.initial("norm.norm.weight"), torch.ones(32))


def test_a_tied_head_has_no_weights_of_its_own_in_the_directory(tmp_path: Path) -> None:
    """``verify`` compares first values by canonical name: the file has the embedding alone."""
    config = run_config(directory("qwen3", tmp_path, weights=True, tie_word_embeddings=True))
    assert initial_problems(config.model, config.run, configured_model(config)) == []


def test_training_begins_with_the_weights_that_are_there(tmp_path: Path) -> None:
    path = directory("llama", tmp_path, weights=True, shard="20KB")
    assert (path / "model.safetensors.index.json").is_file()
    model = build_model(f"hf:{path}", {}, 1)
    whole = import_transformers().AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    names = model.layers.names_in_transformers
    assert isinstance(names, dict)
    for name, theirs in names.items():
        assert torch.equal(model.initial(name), whole.get_parameter(theirs)), name
    fresh = build_model(f"hf:{path}", {"weights": False}, 1)
    assert not torch.equal(fresh.initial("head.lm_head.weight"), whole.lm_head.weight)
    fewer = build_model(f"hf:{path}", {"num_hidden_layers": 1}, 1)
    assert torch.equal(
        fewer.initial("block0.layer.mlp.up_proj.weight"), whole.model.layers[0].mlp.up_proj.weight
    )


def test_what_is_kept_between_layers_is_of_these_positions_alone(tmp_path: Path) -> None:
    """Other lengths, evaluation and training in turns, positions that are written into:
    each gets its own angles.
    """
    layers = plain_layers(build_model(f"hf:{directory('gemma2', tmp_path)}", {}, 1), torch.float64)
    ids = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(0))
    first = layers(ids)
    with torch.inference_mode():
        assert torch.allclose(layers(ids[:, :7]), first[:, :7], atol=1e-12)
        assert torch.allclose(layers(ids), first, atol=1e-12)
    layers(ids).sum().backward()
    positions = torch.arange(12).repeat(2, 1)
    given = {"input_ids": ids, "position_ids": positions}
    assert torch.allclose(layers(given), first, atol=1e-12)
    positions[:, 6:] -= 6
    assert not torch.allclose(layers(given)[:, 6:], first[:, 6:], atol=1e-6)
    assert torch.allclose(layers(given)[:, 6:], layers(ids[:, 6:]), atol=1e-12)


def test_documents_in_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    """Positions that come with the samples and start anew: transformers masks what lies before."""
    layers = plain_layers(build_model(f"hf:{directory('llama', tmp_path)}", {}, 1), torch.float64)
    ids = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[*range(5), *range(7)], list(range(12))])
    packed = layers({"input_ids": ids, "position_ids": positions})
    assert torch.allclose(packed[:1, :5], layers(ids[:1, :5]), atol=1e-12)
    assert torch.allclose(packed[:1, 5:], layers(ids[:1, 5:]), atol=1e-12)
    assert torch.allclose(packed[1:], layers(ids[1:]), atol=1e-12)
    assert not torch.allclose(packed[:1, 5:], layers(ids[:1])[:, 5:])
    # as a corpus gives them
    assert torch.equal(layers({"tokens": ids, "starts": positions == 0}), packed)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen3_next", r"linear_attn\.conv1d is a convolution over tokens"),
        ("minimax", "has no attention of transformers' registry"),
        long_row("olmo_hybrid", r"conv1d is a convolution over tokens"),
    ],
)
def test_documents_that_would_reach_each_other_are_refused(
    kind: str, reason: str, tmp_path: Path
) -> None:
    """Their recurrent layers go on over the borders of documents."""
    layers = plain_layers(build_model(f"hf:{directory(kind, tmp_path)}", {}, 1), torch.float32)
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    layers(ids)
    for given in (
        {"tokens": ids, "starts": ids < 10},
        {"input_ids": ids, "position_ids": torch.arange(12).repeat(2, 1)},
    ):
        with pytest.raises(
            ModelError,
            match=rf"{reason}.*document_boundaries = false",
            check=has_code("MW-INTEROP-140"),
        ):
            layers(given)


@pytest.mark.parametrize("kind", ["llama", long_row("mixtral"), long_row("gemma3_text")])
def test_tokens_of_a_document_do_not_reach_the_next(kind: str, tmp_path: Path) -> None:
    layers = plain_layers(
        build_model(f"hf:{directory(kind, tmp_path)}", {}, 1), torch.float32
    ).eval()
    ids, other = (
        torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    )
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[:, [0, 6]] = True
    changed = torch.cat([other[:, :6], ids[:, 6:]], 1)
    first, second = (layers({"tokens": each, "starts": starts}) for each in (ids, changed))
    assert torch.allclose(first[:, 6:], second[:, 6:], atol=1e-6)
    assert not torch.allclose(first[:, :6], second[:, :6], atol=1e-3)
