"""A dry run into a store says where the credentials come from and none of their values; errors show the given URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt
from ckpt_tool.storage.stores.object_store import CLOUDS, describe_credentials, given_url

ROOT = Path(__file__).resolve().parents[2]
SECRET = "wJalrXUtnFEMI"


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://bucket/out", "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/out", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://box/out", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_variables_are_named(url: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without = describe_credentials(url)
    assert "none in the environment" in without and CLOUDS[url.partition(":")[0]].keys in without
    monkeypatch.setenv(variable, SECRET)
    found = describe_credentials(url)
    assert f"found in {variable}" in found and SECRET not in found


def test_a_profile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"[lab]\naws_access_key_id = AKIA\naws_secret_access_key = {SECRET}\n"
    (tmp_path / "credentials").write_text(text)
    monkeypatch.setenv("AWS_PROFILE", "lab")
    found = describe_credentials("s3://bucket/out")
    assert "AWS profile lab" in found and SECRET not in found and "AKIA" not in found


def test_a_dry_run_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    source = str(ROOT / "fixtures" / "deepspeed" / "z3_bf16_dp4")
    try:
        report: Any = ckpt.convert(source, "s3://bucket/out", to="safetensors", as_model="master", dry_run=True)
    except ckpt.StorageError as error:  # where the dry run looks whether the output is there
        pytest.skip(f"the store has to answer: {error.message}")
    assert any("found in AWS_ACCESS_KEY_ID" in note for note in report["notes"]) and SECRET not in str(report)


@pytest.mark.parametrize(
    ("url", "given"),
    [
        ("s3://bucket/run/.out.ckpt-partial", "s3://bucket/run/out"),
        ("s3://bucket/run/.out.ckpt-partial/claim-1-1", "s3://bucket/run/out"),
        ("s3://bucket/.hidden/out", "s3://bucket/.hidden/out"),
        ("az://box/notes.ckpt-partial", "az://box/notes.ckpt-partial"),
    ],
)
def test_errors_show_the_url_that_was_given(url: str, given: str) -> None:
    assert given_url(url) == given
