"""What `--sign` writes, judged by OpenSSF's own `model_signing`, attestations by in-toto's types (marker `peers`).

python -m venv V && V/bin/pip install model-signing==1.1.1 pyopenssl
CKPT_SIGNING_PYTHON=V/bin/python python -m pytest -m peers tests/signing
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_sealed import CASES, FIXTURES, flip, new_key

pytestmark = pytest.mark.peers
PYTHON = os.environ.get("CKPT_SIGNING_PYTHON", sys.executable)
_READ = """
import base64, json, sys
from google.protobuf import json_format
from in_toto_attestation.v1 import statement_pb2
envelope = json.load(open(sys.argv[1]))["dsseEnvelope"]
statement = json_format.Parse(base64.b64decode(envelope["payload"]), statement_pb2.Statement())
from in_toto_attestation.v1.statement import Statement
Statement.copy_from_pb(statement).validate()
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
json_format.ParseDict(json_format.MessageToDict(statement.predicate), provenance_pb2.Provenance())
"""


@pytest.fixture(scope="module", autouse=True)
def there() -> None:
    if subprocess.run([PYTHON, "-c", "import model_signing"], capture_output=True).returncode:
        pytest.skip(f"model-signing is not installed for {PYTHON}: set CKPT_SIGNING_PYTHON")


def verified(folder: Path, public: Path) -> str:
    """What it says, "" where it verifies."""
    words = ["verify", "key", str(folder), "--public_key", str(public), "--signature", str(folder / "model.sig")]
    done = subprocess.run([PYTHON, "-m", "model_signing", *words], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("curve", ["SECP256R1", "SECP384R1", "SECP521R1"])
@pytest.mark.parametrize("case", CASES)
def test_the_real_library_verifies_and_refuses_a_flipped_byte(case: str, curve: str, tmp_path: Path) -> None:
    private, public = new_key(tmp_path, curve)
    source, options = CASES[case]
    out = tmp_path / "out"
    ckpt.convert(FIXTURES / source, out, sign=private, attest=out / "provenance.json", **options)
    assert verified(out, public) == ""
    file = max((path for path in out.rglob("*") if path.name != "model.sig"), key=lambda path: path.stat().st_size)
    flip(file)
    assert f"Hash mismatch for '{file.relative_to(out)}'" in verified(out, public).replace("\\'", "'")
    flip(file)
    (out / "extra").write_text("x")
    assert "Extra files" in verified(out, public)


def test_in_toto_s_own_types_take_the_attestation(tmp_path: Path) -> None:
    private, _ = new_key(tmp_path)
    options: dict[str, Any] = {"sign": private, "attest": tmp_path / "said.json", "to": "safetensors"}
    ckpt.convert(FIXTURES / "dcp/tp2_dp2", tmp_path / "out", **options)
    done = subprocess.run([PYTHON, "-c", _READ, str(tmp_path / "said.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
