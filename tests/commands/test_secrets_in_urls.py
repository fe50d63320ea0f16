"""URLs with a user name, a password or a signature: read as they are, and shown nowhere, by no verb, in no file.

`vault://` stands for a web server that wants them: it knows one user, one password and one signature.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from ckpt_tool import api
from ckpt_tool.cli import run
from ckpt_tool.core import urls
from ckpt_tool.core.urls import full_url, has_hidden_secrets, hide_in_argument, hide_in_message, hide_secrets, last_name

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

FIXTURES = Path(__file__).parents[2] / "fixtures"
SECRETS = ("annabel", "s3cr3t", "9f31abc", "X-Sig")
URL = "vault://annabel:s3cr3t@host/b/model.safetensors?X-Sig=9f31abc/def%3D&exp=1"
SHOWN = "vault://***@host/b/model.safetensors?***"


class Vault(MemoryFileSystem):
    """A file system of one web server: a path without the secrets is refused, and the refusal repeats it."""

    protocol = ("vault", "https")
    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def _checked(self, path: str) -> str:
        head, _, query = path.partition("?")
        if path in Vault.store:
            return path  # a URL as a whole
        if "annabel:s3cr3t@" not in head or not query.startswith("X-Sig=9f31abc"):
            raise PermissionError(f"403 for {path}: signature {unquote(query)} of {path.partition('@')[0][8:]}")
        return "/" + head.partition("@")[2].partition("/")[2]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        name = self._checked(path)
        if name not in self.store:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.store[name]), "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return self.store[self._checked(path)][start:end]


@pytest.fixture(autouse=True)
def vault(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("vault", Vault, clobber=True)
    monkeypatch.setattr(urls, "_full_urls", {})
    monkeypatch.setattr(Vault, "store", {})
    Vault.store["/b/model.safetensors"] = (FIXTURES / "gguf-made/gemma3/model.safetensors").read_bytes()
    yield


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/run/iter_5", "s3://bucket/run/iter_5"),
        ("hf://gpt2@main/model.safetensors", "hf://gpt2@main/model.safetensors"),
        ("hf://org/name@main", "hf://org/name@main"),
        ("abfss://container@account.dfs.core.windows.net/run", "abfss://container@account.dfs.core.windows.net/run"),
        ("abfss://ann:pw@account/run", "abfss://***@account/run"),
        ("https://token@host/a.pt", "https://***@host/a.pt"),
        ("https://ann:p@ss@host/a.pt", "https://***@host/a.pt"),
        ("https://host/a.pt?download", "https://host/a.pt?download"),
        ("https://host/a.pt?download=true&token=1&ref=main", "https://host/a.pt?download=true&ref=main&***"),
        ("https://host/a.pt?9f31abc", "https://host/a.pt?***"),
        ("https://host/a.pt?raw=9f31abc", "https://host/a.pt?***"),
        ("https://host/a.pt;sig=9f31abc", "https://host/a.pt;***"),
        ("https://host/run;sig=9f/31/abc/a.pt?x=1", "https://host/run;***?***"),
        ("https://host/a.pt%3Fsig%3D9f31abc", "https://host/a.pt%3F***"),
        ("https://host/a.pt&sig=9f31abc", "https://host/a.pt&***"),
        ("https://host/proxy/https://ann:pw@host/a.pt", "https://host/proxy/https://***@host/a.pt"),
        ("https://ann:pw", "https://***"),
        ("https://ann%3Apw%40host/a.pt", "https://***/a.pt"),
        ("https://ann:p?w@host/a.pt", "https://***?***"),
        ("https:/ann:pw@host/a.pt", "https:/***@host/a.pt"),
        ("https%3A%2F%2Fann%3Apw%40host%2Fa.pt", "https%3A%2F%2F***"),
        ("https%253A%252F%252Fann%253Apw%2540host", "https%253A%252F%252F***"),
        (r"https:\/\/ann:pw@host\/a.pt", r"https:\/\/***"),
        (r"https:\u002f\u002fann:pw@host", r"https:\u002f\u002f***"),
        ("hf://hf_9f31abc@org/name", "hf://***@org/name"),
        ("hf://9f31abc@name", "hf://***@name"),
        ("abfss://9F31abc==@account/run", "abfss://***@account/run"),
        ("s3://bucket/date=2026-01-01/run", "s3://bucket/date=2026-01-01/run"),
        ("s3://bucket/run#1/a.pt", "s3://bucket/run#1/a.pt"),
        ("s3://bucket/run#token=9f31abc", "s3://bucket/run#***"),
        ("memory://权重/run", "memory://权重/run"),
        ("zip://a b.pt::https://ann:pw@host/a.zip", "zip://a b.pt::https://***@host/a.zip"),
        ("https://[::1]:8080/a.pt", "https://[::1]:8080/a.pt"),
        ("https://host/a.pt?sig=a/b&x=1", "https://host/a.pt?***"),
        ("https://host/a.pt#access_token=1", "https://host/a.pt#***"),
        ("simplecache::https://ann:pw@host/a.pt", "simplecache::https://***@host/a.pt"),
        ("--base=https://ann:pw@host/a.pt", "--base=https://***@host/a.pt"),
        ("403 for 'https://ann:pw@host/a.pt?s=1' today", "403 for 'https://***@host/a.pt?***' today"),
        ("runs/7?x=1", "runs/7?x=1"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert hide_secrets(url) == hide_secrets(shown) == shown
    assert has_hidden_secrets(shown) == (url != shown)
    if url.startswith("403"):
        return
    assert hide_in_argument(url) == hide_in_argument(shown) == shown
    if "=" not in url.partition("://")[0]:
        assert full_url(shown) == url


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("https://host/a.pt?a='x'&sig=9f 31abc", "https://host/a.pt?***"),
        ("--base=https://ann:p w@host/a b.pt", "--base=https://***@host/a b.pt"),
    ],
)
def test_a_url_of_a_command_line_ends_where_the_word_ends(word: str, shown: str) -> None:
    assert hide_in_argument(word) == shown


def test_a_file_that_is_called_like_a_url_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of downloads give such names."""
    monkeypatch.chdir(tmp_path)
    name = "https%3A%2F%2Fhost%2Fa%3Fb"
    Path(name).write_bytes(Vault.store["/b/model.safetensors"])
    assert run(["inspect", name, "-q"]) == 0


def test_a_message_of_a_library_shows_no_part_of_a_url() -> None:
    hide_in_argument("https://ann:pass%20word1@host/a.pt?sig=9f31abc%2Fdef&a='b'")
    for text in (
        "refused: 9f31abc/def",
        "refused: 9f31abc%2Fdef for ann",
        "the password is 'pass word1'",
        "GET /a.pt?sig=9f31abc%2Fdef&a='b'",
        "https://ann:pass%20word1@host/a.pt?sig=9f31abc%2Fdef&a='b'",
    ):
        hidden = hide_in_message(text)
        assert "9f31" not in hidden and "pass" not in hidden.replace("password is", ""), hidden


def test_the_name_of_a_file_has_no_secret() -> None:
    urls_and_names = [
        ("https://***@host/b/a.pt?***", "a.pt"),
        ("https://host/b/a.pt;***", "a.pt"),
        ("https://host/b/a.pt?download=true&***", "a.pt"),
        ("s3://bucket/a.pt", "a.pt"),
    ]
    for url, name in urls_and_names:
        assert last_name(url) == name


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("vault://host/b/model.safetensors;X-Sig=9f31abc/def", "vault://host/b/model.safetensors;***"),
        ("vault://host/b/model.safetensors?9f31abcdef", "vault://host/b/model.safetensors?***"),
        ("vault://host/b/model.safetensors?a='x y'&X-Sig=9f31abc", "vault://host/b/model.safetensors?***"),
        ("vault://host/b/model.safetensors%3FX-Sig=9f31abc", "vault://host/b/model.safetensors%3F***"),
    ],
)
def test_secrets_in_odd_places_are_used_and_not_shown(
    url: str, shown: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Vault.store[url] = Vault.store["/b/model.safetensors"]
    plan = tmp_path / "plan.json"
    out = tmp_path / "out"
    lines = [
        ["inspect", url],
        ["verify", url, "--json"],
        ["audit", url, "-vv"],
        ["convert", url, str(out), "--to", "safetensors", f"--report={tmp_path}/page.html", "--progress=json"],
        ["convert", url, str(tmp_path / "other"), "--to", "dcp", "--plan", str(plan)],
        ["inspect", f"{url}WRONG", "-vv"],
        ["inspect", f"{url}WRONG", "-vv", "--json"],
        ["convert", str(out), url, "-vv"],
    ]
    for line in lines:
        code = run(line)
        streams = capfd.readouterr()
        assert code in ((2, 7) if "WRONG" in line[1] or url in line[2:] else (0, 1)), (line, streams.err)
        assert not [word for word in SECRETS if word in streams.out + streams.err], (line, streams.out + streams.err)
    written = everything_written(tmp_path)
    assert shown in written and not [word for word in SECRETS if word in written]


def test_two_files_that_only_their_query_tells_apart_stay_two() -> None:
    one = hide_secrets("https://host/get?id=1")
    two = hide_secrets("https://host/get?id=2")
    assert one != two and (full_url(one), full_url(two)) == ("https://host/get?id=1", "https://host/get?id=2")


def everything_written(folder: Path) -> str:
    return "".join(path.read_text("utf-8", "replace") for path in folder.rglob("*") if path.is_file())


def test_no_verb_shows_a_secret(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """stdout, stderr, plans, attestations, reports of every kind, and what is written."""
    out = tmp_path / "out"
    lines = [
        ["inspect", URL],
        ["inspect", URL, "--json", "--report", f"{out}/inspect.html"],
        ["inspect", URL, "--stats"],
        ["inspect", URL, "--security"],
        ["verify", URL, "--report", f"{out}/verify.html"],
        ["verify", URL, "--json"],
        ["audit", URL, "--sarif", f"{out}/a.sarif", "--junit", f"{out}/a.xml", "--report", f"{out}/audit.html"],
        ["diff", URL, URL, "--json"],
        ["convert", URL, f"{out}/c", "--to", "safetensors", "--attest", f"{out}/att.json", "--report", f"{out}/c.html"],
        ["convert", URL, f"{out}/d", "--to", "dcp", "--dry-run", "--json"],
        ["convert", URL, f"{out}/e", "--to", "dcp", "--plan", f"{out}/plan.json"],
        ["merge", URL, f"{out}/f"],
    ]
    out.mkdir()
    for line in lines:
        code = run(line)
        streams = capfd.readouterr()
        assert code in (0, 1), (line, streams.err)
        assert not [word for word in SECRETS if word in streams.out + streams.err], line
    assert (out / "plan.json").exists() and (out / "c").exists() and (out / "a.sarif").exists()
    written = everything_written(out)
    assert not [word for word in SECRETS if word in written]
    assert SHOWN in written


@pytest.mark.parametrize("json_too", [False, True])
@pytest.mark.parametrize(
    "line",
    [
        ["inspect", URL.replace("model.", "no.")],
        ["inspect", URL.replace("9f31abc", "9f31abcWRONG").replace("X-Sig", "X-SigX")],
        ["inspect", URL, "--from", "gguf"],
        ["inspect", URL.replace("vault", "no-such-scheme")],
        ["inspect", URL.replace("vault", "s3")],
        ["inspect", URL.replace("vault", "az")],
        ["convert", URL, "OUT"],
        ["convert", URL, URL, "--to", "safetensors"],
        ["convert", "OUT", URL.replace("vault", "s3"), "--to", "safetensors"],
        ["convert", "OUT", URL.replace("vault", "az"), "--to", "safetensors"],
        ["frobnicate", URL],
        ["inspect", f"--frobnicate={URL}"],
        ["prune", URL, "--keep-last", "1"],
        ["latest", URL],
        ["clean", URL],
        ["status", URL],
    ],
)
def test_no_error_shows_a_secret(line: list[str], json_too: bool, tmp_path: Path, capfd: Any) -> None:
    source = str(FIXTURES / "gguf-made/gemma3")
    words = [source if word == "OUT" and number == 1 else word for number, word in enumerate(line)]
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    code = run([*words, "-vv", *(["--json"] if json_too else [])])
    streams = capfd.readouterr()
    assert code
    assert not [word for word in SECRETS if word in streams.out + streams.err], streams.err


@pytest.mark.parametrize(
    "endpoint",
    ["http://annabel:s3cr3t@127.0.0.1:9", ":://s3cr3t", "s3cr3t-9f31abc", "http://[s3cr3t", "http:// s3cr3t"],
)
def test_an_endpoint_that_is_wrong_is_an_error_without_its_secrets(
    endpoint: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rust's client panics for some of them, which is no Exception in Python."""
    pytest.importorskip("obstore")
    for name, value in {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "s3cr3t", "AWS_REGION": "r"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setattr("ckpt_tool.storage.stores.store.UNANSWERED", 0.1)
    assert run(["inspect", "s3://bucket/x.pt", "-vv"]) in (2, 7)
    said = capfd.readouterr().err
    assert "E250" in said and "annabel" not in said and "s3cr3t@" not in said


def test_a_plan_goes_on_with_the_urls_of_the_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    out = tmp_path / "out"
    assert run(["convert", URL, str(out), "--to", "safetensors", "--plan", str(plan)]) == 0
    assert urls.VARIABLE in capfd.readouterr().out

    monkeypatch.setattr(urls, "_full_urls", {})  # as another process has it
    assert run(["apply", str(plan), "--json"]) == 2, capfd.readouterr().err
    error = json.loads(capfd.readouterr().err.splitlines()[-1])["error"]
    assert error["code"] == "E2873" and urls.VARIABLE in error["hint"]

    # The same file, signed again.
    monkeypatch.setenv(urls.VARIABLE, f"https://host/other?a=b {URL.replace('exp=1', 'exp=2')}")
    assert run(["apply", str(plan)]) == 0
    assert run(["diff", str(out), str(FIXTURES / "gguf-made/gemma3/model.safetensors"), "-q"]) == 0


def test_python_shows_no_secret(tmp_path: Path) -> None:
    documents = [api.verify(URL), api.convert(URL, tmp_path / "out", to="safetensors")]
    text = json.dumps(documents, default=str)
    assert SHOWN in text and not [word for word in SECRETS if word in text]
