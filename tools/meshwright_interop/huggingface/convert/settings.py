"""Validated access to the fields of a ``config.json``.

There are fields to convert, fields with only some supported values, and fields without effect on
the logits. All other fields are reported at the end, since an unknown field may change the outputs
of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.errors import ModelError

WITHOUT_EFFECT = """
    _attn_implementation_autoset _name_or_path architectures bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping eos_token_id gradient_checkpointing
    id2label initializer_factor initializer_range is_encoder_decoder label2id length_penalty
    max_length max_window_layers min_length model_type n_ctx n_positions num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_past
    output_scores pad_token_id prefix pretraining_tp problem_type quantization_config
    repetition_penalty
    return_dict return_dict_in_generate sep_token_id task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p use_bfloat16 use_cache classifier_dropout summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
"""
IGNORED = frozenset(WITHOUT_EFFECT.split())
"""Fields without effect on the logits; they are ignored without a note."""


SMALLEST = 1e-30
"""Smallest number that float32 may be divided by."""
MAX_INTEGER = 2**40
"""Upper limit of whole numbers, such as counts of tokens."""
MAX_WIDTH = 2**20
"""Upper limit of a model's widths and of its number of heads."""
MAX_LAYERS = 10_000
MAX_ROWS = 2**26
"""Upper limit of the rows of a token or position embedding."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


class Settings:
    """Fields of one config.json. Each access collects problems; ``end`` raises all of them at once.

    Args:
        fields: the parsed config.json.
        place: its path, for messages.
        aliases: second names of fields, which transformers accepts as well -> their first names.
    """

    def __init__(
        self, fields: Mapping[str, Any], place: str, aliases: Mapping[str, str] | None = None
    ) -> None:
        self.fields = dict(fields)
        self.place = place
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.left_out: list[str] = []
        """Name patterns of tensors without a counterpart in the model, which an import ignores."""
        self.read_fields: set[str] = set()
        for alias, name in (aliases or {}).items():
            if alias in self.fields:
                self._rename(alias, name)

    def _rename(self, alias: str, name: str) -> None:
        value = self.fields.pop(alias)
        if self.fields.setdefault(name, value) != value:
            self.problems.append(
                f"{alias} = {json.dumps(value)} and {name} = {json.dumps(self.fields[name])} are"
                " one field under two names: leave one of them out"
            )

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field unchecked; ``default`` if it is null or missing."""
        self.read_fields.add(name)
        value = self.fields.get(name)
        return default if value is None else value

    def number(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int:
        """Return a field that must be a whole number from ``minimum`` to ``maximum``."""
        value = self.get(name, default)
        if not _is_integer(value) or not minimum <= value <= maximum:
            problem = "is missing" if value is None else f"= {json.dumps(value)}"
            limit = f"to {maximum}" if _is_integer(value) and value > maximum else "up"
            self.problems.append(
                f"{name} {problem}: a whole number from {minimum} {limit} is needed"
            )
            return max(minimum, 1)
        return int(value)

    def real(
        self, name: str, default: float, *, minimum: float = 0.0, maximum: float = math.inf
    ) -> float:
        """Return a field that must be a finite number from ``minimum`` to ``maximum``."""
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= maximum or not math.isfinite(value):
            limit = "up" if maximum == math.inf else f"to {maximum:g}"
            self.problems.append(
                f"{name} = {json.dumps(value)}: a number from {minimum:g} {limit} is needed"
            )
            return default
        return float(value)

    def positive(self, name: str, default: float) -> float:
        """Return a field that the model divides by: a finite number above 0."""
        return self.real(name, default, minimum=SMALLEST)

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that must be true or false. null counts as false,
        as in transformers' own conditions.
        """
        self.read_fields.add(name)
        value = self.fields.get(name, default)
        if not isinstance(value, bool | None):
            self.problems.append(f"{name} = {json.dumps(value)}: true or false is needed")
            return default
        return bool(value)

    def must_be(self, name: str, *values: Any) -> None:
        """Require one of the supported ``values`` of a field that changes outputs;
        the first is its default.

        null counts as false where true and false are meant, else as the default.
        """
        value = self.get(name, values[0])
        is_null = isinstance(values[0], bool) and self.fields.get(name, value) is None
        if is_null and False not in values:
            self.problems.append(f"{name} = null counts as false, and is not supported, only true")
        elif value not in values:
            allowed = " or ".join(map(json.dumps, values))
            self.problems.append(f"{name} = {json.dumps(value)} is not supported, only {allowed}")

    def end(self) -> None:
        """Check token ids, raise the collected problems,
        and add a note for each unknown field.

        Raises:
            ModelError: all problems found, a line each.
        """
        for name in TOKEN_IDS:
            value = self.fields.get(name)
            token_ids: list[Any] = (
                value if isinstance(value, list) and name == "eos_token_id" else [value]
            )
            if value is not None and not all(
                _is_integer(each) and abs(each) < MAX_ROWS for each in token_ids
            ):
                self.problems.append(
                    f"{name} = {json.dumps(value)}: the number of a token is needed, or null"
                )
        if self.problems:
            raise ModelError(
                "MW-INTEROP-038", "\n".join(f"{self.place}: {problem}" for problem in self.problems)
            )
        for name, value in self.fields.items():
            is_unset = value is None or value is False or value == [] or value == {}
            if name not in self.read_fields | IGNORED and not is_unset:
                self.notes.append(
                    f"{self.place}: {name} = {json.dumps(value)[:80]} is not known here and is"
                    " left out"
                )


class Field(NamedTuple):
    """Row of a table of fields: one field of a config.json that is one option of ours."""

    theirs: str
    ours: str
    kind: str = "number"
    """Method of Settings that reads it: number, positive, real or flag."""
    default: Any = None
    """Value of transformers' config class where the field is missing, or a function of the options
    before it.
    """
    maximum: float | None = None

    def read(self, settings: Settings, default: Any) -> Any:
        """Return the validated value of a config.json."""
        limits = {} if self.maximum is None else {"maximum": self.maximum}
        return getattr(settings, self.kind)(self.theirs, default, **limits)


def read_fields(settings: Settings, fields: Sequence[Field], **defaults: Any) -> dict[str, Any]:
    """Return the options of a table of fields. ``defaults``: field -> default of one model type."""
    options: dict[str, Any] = {}
    for field in fields:
        default = defaults.get(field.theirs, field.default)
        options[field.ours] = field.read(
            settings, default(options) if callable(default) else default
        )
    return options


def write_fields(options: Mapping[str, Any], fields: Sequence[Field]) -> dict[str, Any]:
    """Return the fields of a config.json from options."""
    return {field.theirs: options[field.ours] for field in fields}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
