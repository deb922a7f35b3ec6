"""A run with multi-token prediction as users have it: trained, resumed with another weight,
evaluated, sampled.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from meshwright.data.indexed import inspect
from meshwright.data.token_files import TokenStream
from meshwright.inference.sample import sample
from meshwright.run.directory import run_directory
from meshwright_interop.huggingface.convert.exporting import export_checkpoint
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import LLAMA, changed, layout, lines, run_config, train
from tests.end_to_end.test_use import evaluated
from tests.support.plain import load_plain

HEADS = {
    "model/head_loss/0",
    "model/head_loss/1",
    "model/validation/head_loss/0",
    "model/validation/head_loss/1",
}


@pytest.mark.long
def test_a_run_from_its_first_step_to_transformers(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    options = LLAMA | {"mtp_layers": 1, "mtp_loss_weight": 0.3, "num_layers": 2}
    config = run_config(
        corpus,
        tmp_path,
        model={"builder": "meshwright_models.llama:build", "options": options},
        data={"document_boundaries": True},
        parallel=layout("pp2,tp2,sequence"),
        train={"steps": 4, "validate_every": 2, "validate_steps": 2},
        checkpoint={"every": 4},
    )
    train(pool, config)
    last = lines(config)[-1]
    assert last.keys() >= HEADS
    assert last["validation/loss"] == pytest.approx(last["model/validation/head_loss/0"], rel=1e-12)
    assert last["train/loss"] > last["model/head_loss/0"]

    lower = changed(
        config, model={"options": options | {"mtp_loss_weight": 0.1}}, train={"steps": 8}
    )
    said = train(pool, changed(lower, parallel=layout("dp2") | {"sequence": False}))
    assert "changed: model.options.mtp_loss_weight: 0.3 -> 0.1" in said
    assert lines(config)[-1]["step"] == 8

    place = run_directory(config.run)
    resolved, plain = load_plain(place)
    assert resolved.data.tokenizer is not None and resolved.data.validation is not None
    found = evaluated(pool, config, tmp_path / "found.json", "pp2")
    logged = lines(config)[-1]["validation/loss"]
    assert found["while_training"] == {
        "loss": pytest.approx(logged, rel=1e-6),
        "batches": 2,
        "logged": logged,
    }
    assert found["perplexity"] == pytest.approx(math.exp(float(str(found["loss"]))), rel=1e-6)

    tokenizer = Tokenizer.from_file(resolved.data.tokenizer)
    ids = tokenizer.encode("the mesh waits. ").ids
    for _ in range(5):
        starts = torch.zeros(1, len(ids), dtype=torch.bool)
        starts[0, 0] = True
        ids.append(int(plain({"tokens": torch.tensor([ids]), "starts": starts})[0][0, -1].argmax()))
    assert sample(place, "the mesh waits. ", 5, temperature=0) == tokenizer.decode(ids)

    out = export_checkpoint(place, tmp_path / "out")
    assert any(
        "LlamaForCausalLM has no multi-token prediction: 1 modules are left out" in note
        for note in out.notes
    )
    transformers = import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(out.path, local_files_only=True)
    stream = TokenStream(inspect(Path(resolved.data.validation)))
    window = torch.from_numpy(stream.read(0, 33))
    with torch.no_grad():
        theirs, ours = model(window[None, :-1]).logits[0], plain(window[None, :-1])
    assert isinstance(ours, tuple) and len(ours) == 2
    torch.testing.assert_close(theirs, ours[0][0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        F.log_softmax(ours[0][0], -1), F.log_softmax(ours[1][0], -1), atol=1e-2
    )
