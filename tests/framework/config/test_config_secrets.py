"""Options that look like secrets are refused by name; their values are in no message."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshwright.config import load, parse
from meshwright.system.secret_text import has_secret, hide_secrets
from tests.support.errors import raises

CANARY = "canary-5e1f"
SECRET = "MW-CONFIG-016"
BATCH = "[data]\ntrain = 'corpus'\n[batch]\nmicro_batch_size = 1\nchunks = 1\n"


def refused(path: Path, code: str, text: str, *overrides: str, key: str = "") -> str:
    """Check that the configuration is refused; return the message, which shows no secret."""
    path.write_text(BATCH + text)
    with raises(code, key, "command line" if overrides else path) as caught:
        load(path, overrides)
    assert CANARY not in str(caught.value)
    return str(caught.value)


NAMES = [
    "api_key",
    "hf_token",
    "HF_TOKEN",
    "db-password",
    "x_secret",
    "secret_id",
    "key",
    "token",
    "apiKey",
    "apikey",
    "credentials",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "credential",
    "auth",
    "basicAuth",
    "dsn",
    "sentry_dsn",
    "sas_url",
    "container_sas",
    "authorization",
    "db_pwd",
    "webhook_url",
    "bearer",
    "session_cookie",
    "jwt",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = f"[model.options]\n{name} = '{CANARY}'\n"
    assert "\n" not in refused(path, SECRET, text, key=f"model.options.{name}")
    refused(path, SECRET, "", f"--data.options.{name}={CANARY}", key=f"data.options.{name}")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            f"[data.options]\nstore = {{ login = {{ password = '{CANARY}' }} }}\n",
            "data.options.store.login.password",
        ),
        (f"[data.options]\nstores = [{{ api_key = '{CANARY}' }}]\n", "data.options.stores.api_key"),
        (f"[data.options]\napi_key = ['{CANARY}']\n", "data.options.api_key"),
        (f"[data.options]\npasswords = {{ db = '{CANARY}' }}\n", "data.options.passwords.db"),
        (f"[model.options]\nrate = nan\napi_key = '{CANARY}'\n", "model.options.api_key"),
        (
            f"[model]\noptions = {{ my_key = '{CANARY}', day = 2026-01-01 }}\n",
            "model.options.my_key",
        ),
        ("[data.options]\npassword = 1234\n", "data.options.password"),
        (f"[data.options]\nauth = ['me', '{CANARY}']\n", "data.options.auth"),
        (
            f"[data.options]\nauth = {{ user = 'me', pass_ = '{CANARY}' }}\n",
            "data.options.auth.user",
        ),
        (f"[data.options]\nstore = 'postgresql://me:{CANARY}@db:5432/a'\n", "data.options.store"),
        (
            f"[data.options]\nstores = [{{ url = 'https://h/a?b=1&sig={CANARY}' }}]\n",
            "data.options.stores.url",
        ),
        (
            f"[optimizer.options]\nplace = 'AccountName=a;AccountKey={CANARY};B=c'\n",
            "optimizer.options.place",
        ),
    ],
)
def test_wherever_it_stands(text: str, name: str, tmp_path: Path) -> None:
    refused(tmp_path / "run.toml", SECRET, text, key=name)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("MW-CONFIG-013", f"[model]\napi_key = '{CANARY}'\n"),
        ("MW-CONFIG-013", f"[wandb]\napi_key = '{CANARY}'\n"),
        ("MW-CONFIG-031", f"[model.options]\napi_key = '{CANARY}\n"),
        ("MW-CONFIG-031", f"[model]\noptions = {{ a = 1, hf_token = {CANARY} }}\n"),
    ],
)
def test_no_other_message_shows_one(code: str, text: str, tmp_path: Path) -> None:
    refused(tmp_path / "run.toml", code, text)


def test_a_saved_configuration_has_none() -> None:
    text = f'{{"data": {{"options": {{"api_key": "{CANARY}"}}}}}}'
    with raises(SECRET, "resolved.json", "data.options.api_key") as caught:
        parse(text, "resolved.json")
    assert CANARY not in str(caught.value)


def test_innocent_names_pass(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        BATCH
        + "[model.options]\ntokenizer = 'bpe'\ntokens = 'all'\nkey_size = 64\nnum_key_value_heads ="
        " 8\npad_token = '<pad>'\neos_token = 0\nkeys = 'two'\nmonkey = 'x'\nd_key ="
        " 64\ntoken_mixer = 'attention'\nkeyboard = 'qwerty'\napi_key = ''\nkeep_key ="
        " true\nauthor = 'me'\nsassy = 'x'\npage = 'https://h:8080/a@b'\nquery ="
        " 'https://h/x?keys=2&q=token&page=3#top'\nremote = 'ssh://git@h/a.git'\nprose = 'a"
        " key=3; the token is 5'\nmail = 'me@h.org'\nimage = 'registry:5000/me/image@sha256:ab'\n"
    )
    assert load(path).model.options["token_mixer"] == "attention"


URLS = [
    "https://me:{}@host/x",
    "https://:{}@host",
    "https://{}@github.com/me/it.git",
    "HTTPS://me:{}@host:8080/x?y=1",
    "s3://AKIA:{}@bucket/key",
    "postgresql+psycopg2://me:{}@[::1]:5432/db",
    "redis://:{}@cache/0",
    "https://me:a%40{}@host",
    "https://bucket.s3.amazonaws.com/x?X-Amz-Credential=a&X-Amz-Signature={}&X-Amz-Date=1",
    "https://b.s3.amazonaws.com/x?X-Amz-Security-Token={}",
    "https://account.blob.core.windows.net/c?sv=2024&sp=r&sig={}",
    "https://storage.googleapis.com/b/o?X-Goog-Signature={}",
    "https://b.s3.amazonaws.com/x?AWSAccessKeyId=a&Signature={}&Expires=1",
    "https://host/x?access%5Ftoken={}",
    "https://host/x?token={}",
    "https://host/cb#id_token={}&state=1",
    "see https://host/x?api_key={} for it",
    "DefaultEndpointsProtocol=https;AccountName=me;AccountKey={}==;EndpointSuffix=core.windows.net",
    "Server=db;User Id=me;Pwd={};",
    "host=db user=me password={} dbname=x",
    "host=db password = '{} and more'",
    "BlobEndpoint=https://a.blob.core.windows.net;SharedAccessSignature={}",
    "Bearer {}",
]


@pytest.mark.parametrize("url", URLS)
def test_a_url_with_a_password_is_a_secret_in_any_key(url: str, tmp_path: Path) -> None:
    """In options, in other keys, on the command line; hidden in messages on something else,
    and in those of sinks.
    """
    path, value = tmp_path / "run.toml", url.format(f"{CANARY}0123456789")
    refused(path, SECRET, f'[tracking]\nnotes = "{value}"\n', key="tracking.notes")
    refused(path, SECRET, "", f"--data.tokenizer={value}", key="data.tokenizer")
    refused(path, SECRET, f'[tracking]\ntags = ["a", "{value}"]\n', key="tracking.tags")
    refused(path, SECRET, "", f"--model.options.where={value}", key="model.options.where")
    refused(path, "MW-CONFIG-013", f'[train]\nstpes = "{value}"\n', key="train.stpes")
    refused(path, "MW-CONFIG-031", f'[train]\nsteps = "{value}" x\n')
    shown = hide_secrets(f"no answer from {value}")
    assert CANARY not in shown and shown.startswith("no answer from ")


def test_a_long_text_is_searched_in_linear_time() -> None:
    for piece in ("a ", "a", "://", "a://", ":", "?a=", ";a", "password=", "Bearer ", "'", "a.b-"):
        start_s = time.perf_counter()
        has_secret(piece * (10**6 // len(piece)))
        assert time.perf_counter() - start_s < 5.0, piece
