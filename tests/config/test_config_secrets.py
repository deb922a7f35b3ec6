"""Options that look like secrets are refused by name; their values are in no message."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import load, parse
from meshwright.errors import ConfigError
from tests.support.errors import has_code

CANARY = "canary-5e1f"
BATCH = "[data]\ntrain = 'corpus'\n[batch]\nmicro_batch_size = 1\nchunks = 1\n"


def refused(path: Path, text: str, *overrides: str) -> str:
    path.write_text(BATCH + text)
    with pytest.raises(ConfigError, check=has_code("MW-CONFIG-013", "MW-CONFIG-016", "MW-CONFIG-031")) as caught:
        load(path, overrides)
    assert CANARY not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["api_key", "hf_token", "HF_TOKEN", "db-password", "x_secret", "secret_id", "key", "token", "apiKey", "apikey"],
)
def test_a_secret_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    said = refused(path, f"[model.options]\n{name} = '{CANARY}'\n")
    assert said.startswith(f"{path}: model.options.{name} looks like a secret") and said.count("\n") == 0
    assert "environment variable" in said and "if it is none, give it another name" in said
    said = refused(path, "", f"--data.options.{name}={CANARY}")
    assert said.startswith(f"command line: data.options.{name} looks like a secret")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"[data.options]\nstore = {{ login = {{ password = '{CANARY}' }} }}\n", "data.options.store.login.password"),
        (f"[data.options]\nstores = [{{ api_key = '{CANARY}' }}]\n", "data.options.stores.api_key"),
        (f"[data.options]\napi_key = ['{CANARY}']\n", "data.options.api_key"),
        (f"[data.options]\npasswords = {{ db = '{CANARY}' }}\n", "data.options.passwords.db"),
        (f"[model.options]\nrate = nan\napi_key = '{CANARY}'\n", "model.options.api_key"),
        (f"[model]\noptions = {{ my_key = '{CANARY}', day = 2026-01-01 }}\n", "model.options.my_key"),
        ("[data.options]\npassword = 1234\n", "data.options.password"),
    ],
)
def test_wherever_it_stands(text: str, name: str, tmp_path: Path) -> None:
    assert f"{name} looks like a secret" in refused(tmp_path / "run.toml", text)


def test_no_other_message_shows_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert "model.api_key: there is no such key" in refused(path, f"[model]\napi_key = '{CANARY}'\n")
    assert "there is no section" in refused(path, f"[wandb]\napi_key = '{CANARY}'\n")
    assert "not valid TOML" in refused(path, f"[model.options]\napi_key = '{CANARY}\n")
    assert "not valid TOML" in refused(path, f"[model]\noptions = {{ a = 1, hf_token = {CANARY} }}\n")
    text = f'{{"data": {{"options": {{"api_key": "{CANARY}"}}}}}}'
    with pytest.raises(
        ConfigError,
        match=r"resolved\.json: data\.options\.api_key looks like a secret",
        check=has_code("MW-CONFIG-016"),
    ) as caught:
        parse(text, "resolved.json")
    assert CANARY not in str(caught.value)


def test_innocent_names_pass(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        BATCH + "[model.options]\ntokenizer = 'bpe'\ntokens = 'all'\nkey_size = 64\nnum_key_value_heads = 8\n"
        "pad_token = '<pad>'\neos_token = 0\nkeys = 'two'\nmonkey = 'x'\nd_key = 64\ntoken_mixer = 'attention'\n"
        "keyboard = 'qwerty'\napi_key = ''\nkeep_key = true\n"
    )
    assert load(path).model.options["token_mixer"] == "attention"
