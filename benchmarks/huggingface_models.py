"""Restructured causal language models of transformers, with the proofs of each:
the table in the docs.

    python -m benchmarks.huggingface_models                    every architecture of transformers, small and random
    python -m benchmarks.huggingface_models --kinds phi3 glm   these, and the table with what is known of the others
    python -m benchmarks.huggingface_models --verify phi3      in layouts over ranks, too
    python -m benchmarks.huggingface_models --kinds --verify phi3 --layouts cp2    in this layout; others are kept

An architecture is restructured, or refused with the reason. Its logits and gradients are compared
with those of the unmodified model, with the same weights, in float32. ``--verify`` adds the layouts
of ``meshwright verify`` in float64. Results go to ``benchmarks/results/huggingface_models.json``,
one architecture at a time, and from there into ``docs/huggingface-models.csv``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import tempfile
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F

from meshwright.errors import UserError
from meshwright.model.build import build_model
from meshwright.verify import Verification, parse_layout
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_launch.pool import RankPool
from tests.interop.huggingface.architectures import directory, run_config
from tests.support.plain import plain_layers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "huggingface_models.json"
PAGE, TABLE = ROOT / "docs" / "huggingface-models.md", ROOT / "docs" / "huggingface-models.csv"
BEGIN, END = "<!-- counts: benchmarks/huggingface_models.py -->", "<!-- end of the counts -->"
MOST_PARAMETERS = 20_000_000
"""Parameters of a small form at most: some architectures have their sizes under other keys,
and stay large.
"""
UNDRAWN = ("MW-INTEROP-065", "MW-INTEROP-110")
"""Refusals of fresh weights; such an architecture is examined with weights in its directory."""
LAYOUTS = ("dp2", "pp2", "tp2", "pp2,tp2", "tp2,sequence", "cp2")


def examine(kind: str, place: Path) -> dict[str, Any]:
    """Try to restructure an architecture and compare it with the unmodified model;
    return the state and the reason.
    """
    found = _examined(kind, place, weights=False)
    if any(code in str(found.get("why")) for code in UNDRAWN):
        trained = _examined(kind, place, weights=True)
        if trained["state"] == "restructured":
            trained["impossible"]["fresh weights"] = _code_free(found["why"])
            return trained
    return found


def _examined(kind: str, place: Path, *, weights: bool) -> dict[str, Any]:
    try:
        path = directory(kind, place, weights=weights)
    except Exception as error:
        return {"state": "no small form", "why": _short(error, place)}
    try:
        model = build_model(f"hf:{path}", {}, 1)
        size = sum(parameter.numel() for parameter in model.layers.parameters())
        if size > MOST_PARAMETERS:
            return {"state": "no small form", "why": f"it has {size:,} parameters at these sizes"}
        layers = plain_layers(model, torch.float32).eval()
    except UserError as error:
        return {"state": "refused", "why": _short(error, place)}
    except Exception as error:
        return {"state": "fails", "why": _short(error, place)}
    found: dict[str, Any] = {"state": "restructured", "impossible": model.impossible, "layouts": {}}
    try:
        found |= _compared(path, layers, dict(model.layers.names_in_transformers))  # type: ignore[arg-type]
    except Exception as error:
        return {"state": "fails", "why": _short(error, place)}
    return found


def _code_free(why: str) -> str:
    return re.sub(r" \[MW-[A-Z]+-\d+\]?", "", why)


def _compared(path: Path, layers: torch.nn.Sequential, names: dict[str, str]) -> dict[str, float]:
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    ours = dict(layers.named_parameters(remove_duplicate=False))
    for name, parameter in ours.items():
        theirs[names[name]].data.copy_(parameter.detach())
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    logits, expected = layers(ids), whole(input_ids=ids, use_cache=False).logits
    labels = ids.roll(-1, 1).flatten()
    F.cross_entropy(logits.flatten(0, 1), labels).backward()  # type: ignore[no-untyped-call]
    F.cross_entropy(expected.flatten(0, 1), labels).backward()  # type: ignore[no-untyped-call]
    gradients = [
        float(
            (p.grad - theirs[names[name]].grad).norm()
            / theirs[names[name]].grad.norm().clamp_min(1e-9)
        )
        for name, p in ours.items()
        if p.grad is not None
    ]
    return {"logits": float((logits - expected).abs().max()), "gradients": max(gradients)}


def prove(
    kind: str, place: Path, pool: RankPool, found: dict[str, Any], layouts: Sequence[str]
) -> None:
    """Verify these layouts, as the model supports them, against one process;
    store results in ``found["layouts"]``.
    """
    impossible = found["impossible"]
    path = directory(kind, place, weights="fresh weights" in impossible)
    try:
        verification = Verification(run_config(path), global_batch=4, steps=2, random_tokens=True)
    except Exception as error:
        found["layouts"][layouts[0]] = {
            "passed": False,
            "gradient": None,
            "problems": [_short(error, place)],
        }
        return
    for text in layouts:
        if any(name in text for name in impossible):
            continue
        try:
            row = verification.compare_layout(parse_layout(text), pool, is_repeated=False)
        except UserError as error:  # of the plain run
            found["layouts"][text] = {
                "passed": False,
                "gradient": None,
                "problems": [_short(error, place)],
            }
            continue
        problems = [*verification.problems, *row.problems, *[row.failure] * bool(row.failure)][:1]
        gradient = None if row.failure else row.gradient
        found["layouts"][text] = {
            "passed": not problems,
            "gradient": gradient,
            "problems": problems,
        }


def _short(error: Exception, place: Path) -> str:
    text = " ".join(str(error).replace(f"{place}/", "").split())
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    code = re.search(r" \[MW-[A-Z]+-\d+\]$", text)
    return f"{kind}{text}"[:260] + (code[0] if code and len(kind + text) > 260 else "")


def every_kind() -> list[str]:
    """Return all architectures for which transformers has a causal language model."""
    import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the table: a row for each architecture, the restructured ones first,
    those without a layout after them.
    """
    good = {kind: found for kind, found in results.items() if found["state"] == "restructured"}
    found_rows = []
    for kind, found in sorted(good.items(), key=lambda item: (not item[1]["layouts"], item[0])):
        equal = (
            "equal"
            if found["logits"] == 0 and found["gradients"] < 1e-6
            else f"{found['gradients']:.0e} apart"
        )
        cells = [_cell(found, layout) for layout in LAYOUTS]
        missed = [
            re.sub(r"hf:/\S*/", "hf:", row["problems"][0])
            for row in found["layouts"].values()
            if not _passed(row)
        ][:1]
        reasons = "; ".join(
            [*(f"{name}: {why}" for name, why in found["impossible"].items()), *missed]
        )
        found_rows.append([kind, equal, *cells, reasons])
    others = {kind: _reason(kind, found) for kind, found in results.items() if kind not in good}
    return found_rows + [
        [kind, "not restructured", *[""] * len(LAYOUTS), why] for kind, why in others.items()
    ]


def summary(results: dict[str, dict[str, Any]]) -> str:
    """Return the counts for the page."""
    good = [found for found in results.values() if found["state"] == "restructured"]
    proven = [found for found in good if _is_proven(found["layouts"].values())]
    return (
        f"{len(good)} of the {len(results)} architectures that transformers"
        f" {import_transformers().__version__} has a causal language model for are restructured;"
        f" {len(proven)} of them are proven in layouts over ranks."
    )


def _passed(row: dict[str, Any]) -> bool:
    return bool(row["passed"])


def _is_proven(rows: Collection[dict[str, Any]]) -> bool:
    """Return whether at least one layout has passed,
    and every other one has passed or is refused.
    """
    return any(map(_passed, rows)) and all(
        _passed(row) or row["problems"][0].startswith("refused") for row in rows
    )


def _cell(found: dict[str, Any], layout: str) -> str:
    row = found["layouts"].get(layout)
    if row is None:
        is_impossible = any(name in layout for name in found["impossible"])
        return "" if is_impossible else "not run"
    if row["gradient"] is None:
        return "refused"
    return f"{row['gradient']:.0e}" if row["passed"] else "differs"


def _reason(kind: str, found: dict[str, Any]) -> str:
    why = str(found["why"])
    if "none can be derived" in why:
        cause = why.partition("meta tensors: ")[2].partition(" [MW-")[0].partition(":")[2].strip()
        return (
            "declares no pipeline plan, and none can be derived: its forward fails on meta tensors"
            f" ({cause})"
        )
    if "is not the same model" in why:
        return "declares no pipeline plan, and one tensor between its layers is not enough"
    if "has no module list" in why:
        return "declares no pipeline plan, and has no module list"
    if "is an encoder-decoder" in why:
        return "is an encoder-decoder"
    if "transformers itself cannot run this model: " in why:
        cause = _code_free(why.partition(" with ")[2]).partition(". Correc")[0]
        return (
            "transformers itself cannot run it with the small sizes used here"
            f" ({cause.partition(' at non-')[0]})"
        )
    if "transformers cannot build it: " in why:
        why = _code_free(why.partition("transformers cannot build it: ")[2])
        if why.startswith("ImportError"):
            return f"needs another package ({why.partition(': ')[2].partition(' but ')[0]})"
        return f"transformers cannot build it with the small sizes used here ({why[:150]})"
    if "whose computation transformers fixes" in why:
        return (
            "is a mixture of experts whose computation transformers fixes (no"
            " use_experts_implementation)"
        )
    if found["state"] == "no small form":
        return f"its configuration does not take the small sizes used here ({why[:110]})"
    return re.sub(r"^\S+ \(\w+\): | \[MW-[A-Z]+-\d+\]?$", "", why)


def write(results: dict[str, dict[str, Any]]) -> None:
    """Write the table, and the counts into their place in the page."""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        header = ["architecture", "logits and gradients", *LAYOUTS, "reason"]
        csv.writer(file, lineterminator="\n").writerows([header, *rows(results)])
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text("\n".join([head + BEGIN, summary(results), END]) + tail)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kinds", nargs="*", help="architectures, as config.json's model_type (default: all)"
    )
    parser.add_argument(
        "--verify", nargs="*", default=[], help="of which layouts are proven over ranks"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=LAYOUTS,
        choices=LAYOUTS,
        help="which layouts (default: all)",
    )
    options = parser.parse_args(words)
    warnings.filterwarnings("ignore")
    results: dict[str, dict[str, Any]] = (
        json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    )
    chosen = every_kind() if options.kinds is None else options.kinds
    chosen = [*chosen, *(kind for kind in options.verify if kind not in chosen)]
    with tempfile.TemporaryDirectory() as folder, RankPool(4) as pool:
        for kind in chosen:
            before = results.get(kind, {}).get("layouts", {})
            found = results[kind] = examine(kind, Path(folder))
            if found["state"] == "restructured":
                found["layouts"] = before
                if kind in options.verify:
                    found["layouts"] = {
                        text: row for text, row in before.items() if text not in options.layouts
                    }
                    prove(kind, Path(folder), pool, found, options.layouts)
            print(kind, found["state"], found.get("why", ""), found.get("layouts", ""), flush=True)
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    write(results)


if __name__ == "__main__":
    main()
