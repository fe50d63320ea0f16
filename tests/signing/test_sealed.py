"""`--sign` and `--attest`: what lies in the output, how it was hashed, and what `ckpt verify` finds when it is not so.

Hashes are held against hashlib's over the files that were committed; the statements against the fields that the specs
of in-toto, SLSA and model signing name. The real library is asked in `test_model_signing.py`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from odd_folders import OURS, add_files

import ckpt_tool as ckpt
from ckpt_tool.errors import CkptError
from ckpt_tool.plan import schedule
from ckpt_tool.run import executor, hashes
from ckpt_tool.signing import keys

pytest.importorskip("cryptography")
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def new_key(folder: Path, curve: str = "SECP256R1", password: bytes | None = None) -> tuple[Path, Path]:
    """A private key and its public half, as PEM files."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    made = ec.generate_private_key(getattr(ec, curve)())
    private = folder / f"{curve}.pem"
    public = folder / f"{curve}.pub"
    how = s.BestAvailableEncryption(password) if password else s.NoEncryption()
    private.write_bytes(made.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, how))
    public.write_bytes(made.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return new_key(tmp_path_factory.mktemp("keys"))


def payload(path: Path) -> Any:
    return json.loads(base64.b64decode(json.loads(path.read_bytes())["dsseEnvelope"]["payload"]))


def sums(folder: Path) -> dict[str, str]:
    """Path -> SHA-256 of every file but the signature."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "model.sig")
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# Holes of CRCs before what they are of, of digests and of hashes; many files at once; sides that are turned.
CASES = {
    "torch": ("safetensors/dcp_uneven", {"to": "torch"}),
    "dcp": ("dcp/tp2_dp2", {"to": "dcp", "tp": 2}),
    "sharded": ("dcp/tp2_dp2", {"to": "sharded", "tp": 2}),
    "megatron": ("megatron/moe_tp2ep2etp1", {"to": "megatron", "tp": 1, "pp": 2, "ep": 2, "dp": 2}),
    "megatron-dist": ("megatron-dist/moe_ep2_flat", {"to": "megatron-dist", "ep": 1, "dp": 2}),
    "paddle": ("paddle-unified/llama_tied_hf", {"to": "paddle-flex", "tp": 2, "dp": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_file_is_signed_with_the_hash_that_it_has(
    case: str, key: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "WINDOW", 512)
    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=1 << 12))
    source, options = CASES[case]
    out = tmp_path / "out"
    document = ckpt.convert(FIXTURES / source, out, sign=key[0], threads=3, **options)
    statement = payload(out / "model.sig")
    assert {row["name"]: row["digest"] for row in statement["predicate"]["resources"]} == sums(out)
    assert document["signature"] == str(out / "model.sig")
    found = ckpt.verify(out, key=key[1])
    assert found["ok"] and found["signature"]["authentic"] is True, found["findings"]
    assert found["signature"]["files"] == len(sums(out))


def test_files_are_hashed_while_they_are_written(
    key: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two torch files, whose CRCs lie before their records, next to nothing is left when all values have moved."""
    values = {f"w{k}": np.arange(k, k + (1 << 17), dtype=np.float32) for k in range(8)}
    safetensors.numpy.save_file(values, tmp_path / "in.safetensors")
    left = []
    finish = hashes.FileHashes.finish
    monkeypatch.setattr(hashes, "WINDOW", 1 << 16)
    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=1 << 18))
    monkeypatch.setattr(
        hashes.FileHashes, "finish", lambda self, advance: left.append(self.left) or finish(self, advance)
    )
    options = {"sign": key[0], "threads": 2, "to": "torch", "max_shard_size": "2MB", "fsync": False}
    ckpt.convert(tmp_path / "in.safetensors", tmp_path / "out", **options)
    assert left[0] < 200_000, "of 4 MiB"
    assert ckpt.verify(tmp_path / "out", key=key[1])["ok"]


# -- what is found -----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change one bit near the end, where values are."""
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("made", ["files", "shards", "blake2b"])
def test_what_the_real_library_signed_is_checked(made: str, tmp_path: Path) -> None:
    """`fixtures/signing`: bundles of model-signing 1.1.1, a curve and a way of hashing each."""
    curves = {"files": "prime256v1", "shards": "secp384r1", "blake2b": "secp521r1"}
    public = FIXTURES / "signing" / f"{curves[made]}.pub"
    folder = shutil.copytree(FIXTURES / "signing" / made, tmp_path / "m")

    def findings(**options: Any) -> list[tuple[str, str]]:
        found = ckpt.verify(folder, **{"key": public, **options})
        assert found["ok"] is not bool(found["findings"])
        return [(row["code"], Path(row["file"]).name) for row in found["findings"]]

    assert findings() == []
    assert findings(key=FIXTURES / "signing" / f"{curves['shards' if made == 'files' else 'files']}.pub") == [
        ("E1684", "model.sig")
    ]
    (folder / "tokenizer" / "more.txt").write_text("x")
    with (folder / "tokenizer.txt").open("a") as file:  # grown: the parts that were signed are as they were
        file.write("more")
    (folder / "config.json").unlink()
    assert findings() == [("E1686", "config.json"), ("E1685", "tokenizer.txt"), ("E1687", "more.txt")]
    shutil.rmtree(folder)
    shutil.copytree(FIXTURES / "signing" / made, folder)
    flip(folder / "model.safetensors")
    assert findings() == [("E1685", "model.safetensors")]
    assert findings(key=None) == [("E1685", "model.safetensors")], "damage is seen without a key"
    assert findings(key=None, mode="quick") == [], "and by nobody who does not look"
    text = (folder / "model.sig").read_text()
    (folder / "model.sig").write_text(text.replace('"sig":"M', '"sig":"N'))
    assert findings() == [("E1684", "model.sig"), ("E1685", "model.safetensors")]


def test_a_statement_that_was_edited_is_not_by_the_key(key: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt.convert(FIXTURES / "dcp/tp2_dp2", out, to="safetensors", sign=key[0])
    bundle = json.loads((out / "model.sig").read_bytes())
    statement = payload(out / "model.sig")
    flip(out / "model.safetensors")
    resources = statement["predicate"]["resources"]
    for row in resources:
        row["digest"] = sums(out)[row["name"]]
    whole = b"".join(bytes.fromhex(row["digest"]) for row in resources)
    statement["subject"][0]["digest"]["sha256"] = hashlib.sha256(whole).hexdigest()
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    (out / "model.sig").write_text(json.dumps(bundle))
    assert [row["code"] for row in ckpt.verify(out, key=key[1])["findings"]] == ["E1684"]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_was_added_below_a_signed_folder_is_found(seed: int, key: tuple[Path, Path], tmp_path: Path) -> None:
    """However deep it lies, and whatever its folder is called; a file that a link leads to as well."""
    out = tmp_path / "out"
    ckpt.convert(FIXTURES / "dcp/tp2_dp2", out, to="safetensors", sign=key[0], fsync=False)
    assert ckpt.verify(out, key=key[1])["ok"]
    made = set(add_files(out, seed))
    (out / "a link").symlink_to(min(made))
    (out / "link out").symlink_to(tmp_path)
    rows = ckpt.verify(out, key=key[1])["findings"]
    found = {Path(row["file"]).relative_to(out).as_posix() for row in rows if row["code"] == "E1687"}
    assert found == made | {"a link", "link out"}


@pytest.mark.parametrize("folder", [*OURS, f"sub/{OURS[0]}", "/".join(["d"] * 33)])
def test_a_folder_that_no_reader_looks_into_is_found_too(folder: str, key: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt.convert(FIXTURES / "dcp/tp2_dp2", out, to="safetensors", sign=key[0], fsync=False)
    (out / folder).mkdir(parents=True)
    (out / folder / "payload.py").write_text("x")
    for mode in ("quick", "full"):
        (row,) = ckpt.verify(out, key=key[1], mode=mode)["findings"]
        assert row["code"] == "E1687" and f"{out / folder}".startswith(row["file"])


def test_what_a_signature_never_covers_is_named(key: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt.convert(FIXTURES / "dcp/tp2_dp2", out, to="safetensors", sign=key[0], fsync=False)
    (out / ".git/hooks").mkdir(parents=True)
    (out / ".git/hooks/post-merge").write_text("x")
    (out / ".gitattributes").write_text("x")
    found = ckpt.verify(out, key=key[1])
    assert found["ok"] and found["signature"]["ignored"] == [".git/hooks/post-merge", ".gitattributes"]


def test_what_is_next_to_a_signed_step_is_named(key: tuple[Path, Path], tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    (run_folder / "tokenizer").mkdir(parents=True)
    ckpt.convert(FIXTURES / "dcp/tp2_dp2", run_folder / "step_7", to="safetensors", sign=key[0], fsync=False)
    (run_folder / "latest").write_text("step_7")
    (run_folder / "config.json").write_text("{}")
    (run_folder / "tokenizer/tokenizer.json").write_text("{}")
    outside = [str(run_folder / name) for name in ("config.json", "latest", "tokenizer/tokenizer.json")]
    for mode in ("quick", "full"):
        found = ckpt.verify(run_folder, key=key[1], mode=mode)
        assert found["ok"] and sorted(found["signature"]["outside"]) == outside
    assert "outside" not in ckpt.verify(run_folder / "step_7", key=key[1])["signature"]


def test_an_attestation_says_what_was_made_of_what(key: tuple[Path, Path], tmp_path: Path) -> None:
    source = FIXTURES / "dcp/tp2_dp2"
    out = tmp_path / "out"
    said = tmp_path / "out.intoto.json"
    ckpt.convert(source, out, to="safetensors", attest=said, state=["model"])
    statement = json.loads(said.read_bytes())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {row["name"]: row["digest"]["sha256"] for row in statement["subject"]} == sums(out)
    build = statement["predicate"]["buildDefinition"]
    run = statement["predicate"]["runDetails"]
    assert build["externalParameters"]["command"][:4] == ["ckpt", "convert", "--to", "safetensors"]
    assert run["builder"]["version"]["ckpt-tool"] == ckpt.__version__
    files = [row for row in build["resolvedDependencies"] if row["name"] != "tensors as read"]
    assert {row["uri"] for row in files} == {path.resolve().as_uri() for path in source.glob("*.distcp")}
    assert all("digest" not in row for row in files), "no file of the source was hashed whole"
    lines = [f"model\t{name}\t{digest}\n" for name, digest in ckpt.verify(out)["digests"]["model"].items()]
    (written,) = run["byproducts"]
    assert written["annotations"]["ckpt"]["sum"] == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert ckpt.verify(out, attest=said)["ok"] and not list(tmp_path.glob(".out*"))
    codes = [row["code"] for row in ckpt.verify(out, attest=said, key=key[1])["findings"]]
    assert codes == ["E1688"], "it is not signed"
    flip(out / "model.safetensors")
    assert [row["code"] for row in ckpt.verify(out, attest=said)["findings"]] == ["E1685"]


def test_an_attestation_in_the_output_is_signed_with_it(key: tuple[Path, Path], tmp_path: Path) -> None:
    """And of a merge the files that it is computed of are named."""
    for name in "ab":
        safetensors.numpy.save_file({"w": np.full((4, 4), ord(name), np.float32)}, tmp_path / f"{name}.safetensors")
    out = tmp_path / "out"
    sources = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    ckpt.merge(sources, out, method="linear", sign=key[0], attest=out / "provenance.json")
    statement = payload(out / "provenance.json")
    build = statement["predicate"]["buildDefinition"]
    assert {Path(row["uri"]).name for row in build["resolvedDependencies"]} >= {"a.safetensors", "b.safetensors"}
    assert {row["name"] for row in statement["subject"]} == {"model.safetensors"}
    found = ckpt.verify(out, key=key[1], attest=out / "provenance.json")
    assert found["ok"] and found["attestation"]["authentic"] is True, found["findings"]
    assert {row["name"] for row in payload(out / "model.sig")["predicate"]["resources"]} == set(sums(out))
    assert "provenance.json" in sums(out)


# -- what is refused before a byte moves -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("E1682", {"dst": "out.safetensors"}),
        ("E1682", {"dst": "s3://bucket/out"}),
        ("E1682", {"plan": "p.json"}),
        ("E1682", {"ray": "auto"}),
        ("E1682", {"attest": "out/model.safetensors"}),
        ("E1689", {"attest": "there.json"}),
        ("E0510", {"attest": "in/x.json"}),
        ("E1681", {"sign": "there.json"}),
        ("E1681", {"sign": "locked"}),
        ("E1681", {"sign": "SECP256K1.pem"}),
        ("E0700", {"sign": "absent.pem"}),
    ],
)
def test_what_can_not_be_sealed_is_refused(
    code: str, options: dict[str, str], key: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    safetensors.numpy.save_file({"w": np.zeros((4, 4), np.float32)}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "there.json").write_text("{}")
    if options.get("sign") == "SECP256K1.pem":
        new_key(tmp_path, "SECP256K1")
    if options.get("sign") == "locked":
        shutil.move(new_key(tmp_path, password=b"secret")[0], tmp_path / "locked")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CkptError) as caught:
        ckpt.convert("in", options.get("dst", "out"), to="safetensors", **{"sign": key[0], **_but(options)})
    assert caught.value.code == code
    assert sorted(tmp_path.rglob("*")) == before


def _but(options: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name != "dst"}


@pytest.mark.parametrize("share", [("--part", "1/2"), ("--claim",)])
def test_shares_of_a_plan_are_not_sealed(share: tuple[str, ...], key: tuple[Path, Path], tmp_path: Path) -> None:
    from ckpt_tool.cli import run

    plan = tmp_path / "p.json"
    out = tmp_path / "out"
    ckpt.convert(FIXTURES / "dcp/tp2_dp2", out, to="safetensors", plan=plan)
    assert run(["apply", str(plan), *share, "--sign", str(key[0]), "-q"]) == 2 and not out.exists()
    assert run(["apply", str(plan), "--sign", str(key[0]), "-q"]) == 0
    assert run(["verify", str(out), "--key", str(key[1]), "-q"]) == 0


def test_an_encrypted_key_opens_with_the_environment_s_passphrase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = new_key(tmp_path, "SECP384R1", b"secret")
    monkeypatch.setenv(keys.PASSWORD, "wrong")
    with pytest.raises(CkptError, match="does not open"):
        ckpt.convert(FIXTURES / "dcp/tp2_dp2", tmp_path / "out", to="safetensors", sign=private)
    monkeypatch.setenv(keys.PASSWORD, "secret")
    ckpt.convert(FIXTURES / "dcp/tp2_dp2", tmp_path / "out", to="safetensors", sign=private)
    assert ckpt.verify(tmp_path / "out", key=public)["ok"]
    shown = subprocess.run(["grep", "-rl", "secret", str(tmp_path / "out")], capture_output=True, text=True)
    assert not shown.stdout
