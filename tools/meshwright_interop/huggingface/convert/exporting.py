"""Export of a meshwright model: config.json from ``model.options`` over that of the import,
and the tokenizer files.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.config import Data, RunConfig
from meshwright_interop.huggingface.convert import side_files
from meshwright_interop.huggingface.convert.families import family_of_model, with_defaults
from meshwright_interop.huggingface.convert.family import Family
from meshwright_interop.huggingface.convert.mup import fold_multipliers
from meshwright_interop.huggingface.convert.rope import ORIGINAL_LENGTH
from meshwright_interop.huggingface.end_tokens import add_document_ends
from meshwright_interop.huggingface.export import ExportPlan, export
from meshwright_interop.huggingface.files import CONFIG, TOKENIZER, write_json
from meshwright_interop.huggingface.quantised import QUANTISATION


def plan_export(config: RunConfig, checkpoint: Path) -> ExportPlan:
    """Plan the export of a model that one of the families can hold.

    Raises:
        ModelError, DataError: no family can hold the model, or its tokenizer does not fit.
    """
    imported_files = side_files.side_file_directory(checkpoint.parent.parent, config.data)
    family = family_of_model(
        config.model, side_files.imported_config(imported_files).get("model_type")
    )
    options = with_defaults(family.builder, config.model.options)
    rules, folded = fold_multipliers(family.rules(options), options)
    notes = [*folded, *_vocabulary_notes(imported_files, config.data, options)]
    modules = options.get("mtp_layers", 0)
    if modules:
        notes = [
            *notes,
            (
                f"mtp*: {family.architecture} has no multi-token prediction: {modules} modules are"
                " left out"
            ),
        ]

    def write_files(directory: Path, dtype: str) -> list[str]:
        ids = side_files.write(imported_files, directory, config.data, config.model)
        base = side_files.imported_config(imported_files, family.model_type)
        write_json(directory / CONFIG, _fields(family, options, base, ids, dtype))
        if (directory / TOKENIZER).is_file():
            return [*notes, *add_document_ends(directory, config.data)]
        return [*notes, "there is no tokenizer.json beside it: the run has none (data.tokenizer)"]

    loader = "AutoModelForSeq2SeqLM" if family.task == "span_corruption" else "AutoModelForCausalLM"
    # in older checkpoints; always zeros
    left_out = (*(["mtp*"] if modules else []), "*.router.counts")
    return ExportPlan(
        family.architecture, rules, "its configuration", write_files, loader, left_out
    )


export_checkpoint = partial(export, plan_export)
"""Export a checkpoint of a meshwright model as a Hugging Face directory: :func:`export`."""


def _vocabulary_notes(
    imported_files: Path | None, data: Data, options: Mapping[str, Any]
) -> list[str]:
    candidates = [] if imported_files is None else [imported_files / TOKENIZER]
    candidates += [] if data.tokenizer is None else [Path(data.tokenizer)]
    for path in candidates:
        if path.is_file():
            return side_files.check_vocabulary(path, options["vocab_size"], "the checkpoint")
    return []


def _fields(
    family: Family,
    options: Mapping[str, Any],
    base: Mapping[str, Any],
    ids: Mapping[str, Any],
    dtype: str,
) -> dict[str, Any]:
    """Build the config.json: fields from ``options`` override ``base``,
    the config.json of the import.

    Args:
        family: the model type to write.
        options: model.options, complete.
        base: the imported config.json; empty if there was no import.
        ids: special token ids, used if ``base`` is empty.
        dtype: name of the tensors' element type.
    """
    # These fields of ``base`` state a setting of ``options`` under another name, and could
    # contradict it.
    contradicting = {"rope_scaling", "rope_theta", ORIGINAL_LENGTH, "torch_dtype", *family.aliases}
    contradicting.add(QUANTISATION)  # the weights are not quantised any more
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    fields = {
        name: value for name, value in base.items() if name not in contradicting | names.keys()
    }
    return {
        **names,
        **fields,
        **({} if base else ids),
        **family.write(options),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
