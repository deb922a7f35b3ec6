"""Validated access to the fields of a ``config.json``.

There are fields to convert, fields with only some supported values, and fields without effect on the logits. All other
fields are reported at the end, since an unknown field may change the outputs of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError

SILENT = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_factor",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "max_window_layers",
    "min_length",
    "model_type",
    "n_ctx",
    "n_positions",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
    "classifier_dropout",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
}
"""Fields without effect on the logits; they are ignored without a note."""


MOST = 2**40
"""Upper limit of whole numbers, such as counts of tokens."""
WIDEST = 2**20
"""Upper limit of a model's widths and of its number of heads."""
MOST_LAYERS = 10_000
MOST_ROWS = 2**26
"""Upper limit of the rows of a token or position embedding."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


class Settings:
    """Fields of one config.json. Each access collects problems; ``end`` raises all of them at once.

    Args:
        fields: the parsed config.json.
        place: its path, for messages.
        aliases: second names of fields, which transformers accepts as well -> their first names.
    """

    def __init__(self, fields: Mapping[str, Any], place: str, aliases: Mapping[str, str] | None = None) -> None:
        self.fields = dict(fields)
        self.place = place
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.asked: set[str] = set()
        for alias, name in (aliases or {}).items():
            if alias in self.fields:
                self._rename(alias, name)

    def _rename(self, alias: str, name: str) -> None:
        found = self.fields.pop(alias)
        if self.fields.setdefault(name, found) != found:
            self.problems.append(
                f"{alias} = {json.dumps(found)} and {name} = {json.dumps(self.fields[name])} are one field under two "
                f"names: leave one of them out"
            )

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field unchecked; ``default`` if it is null or missing."""
        self.asked.add(name)
        found = self.fields.get(name)
        return default if found is None else found

    def number(self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """Return a field that must be a whole number from ``least`` to ``most``."""
        found = self.get(name, default)
        if not _is_whole(found) or not least <= found <= most:
            said = "is missing" if found is None else f"= {json.dumps(found)}"
            limit = f"to {most}" if _is_whole(found) and found > most else "up"
            self.problems.append(f"{name} {said}: a whole number from {least} {limit} is needed")
            return max(least, 1)
        return int(found)

    def real(self, name: str, default: float, *, least: float = 0.0, most: float = math.inf) -> float:
        """Return a field that must be a finite number from ``least`` to ``most``."""
        found = self.get(name, default)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not least <= found <= most or not math.isfinite(found):
            limit = "up" if most == math.inf else f"to {most:g}"
            self.problems.append(f"{name} = {json.dumps(found)}: a number from {least:g} {limit} is needed")
            return default
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that must be true or false."""
        found = self.get(name, default)
        if not isinstance(found, bool):
            self.problems.append(f"{name} = {json.dumps(found)}: true or false is needed")
            return default
        return found

    def must_be(self, name: str, *values: Any) -> None:
        """Require one of the supported ``values`` of a field that changes outputs; the first is its default."""
        found = self.get(name, values[0])
        if found not in values:
            allowed = " or ".join(json.dumps(value) for value in values)
            self.problems.append(f"{name} = {json.dumps(found)} is not supported, only {allowed}")

    def end(self) -> None:
        """Check token ids and quantisation, raise the collected problems, and add a note for each unknown field.

        Raises:
            ModelError: all problems found, a line each.
        """
        for name in TOKENS:
            found = self.fields.get(name)
            several: list[Any] = found if isinstance(found, list) and name == "eos_token_id" else [found]
            if found is not None and not all(_is_whole(each) and abs(each) < MOST_ROWS for each in several):
                self.problems.append(f"{name} = {json.dumps(found)}: the number of a token is needed, or null")
        if self.fields.get("quantization_config"):
            self.problems.append(
                "quantization_config: the weights are quantised; take the original ones, or write them out in bfloat16 "
                "with transformers (model.dequantize(); model.save_pretrained(...))"
            )
        if self.problems:
            raise ModelError("MW-INTEROP-038", "\n".join(f"{self.place}: {problem}" for problem in self.problems))
        for name, value in self.fields.items():
            idle = value is None or value is False or value == [] or value == {}
            if name not in self.asked | SILENT and not idle:
                self.notes.append(f"{self.place}: {name} = {json.dumps(value)[:80]} is not known here and is left out")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
