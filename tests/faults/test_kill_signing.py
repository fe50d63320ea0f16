"""Kills of a run that signs: no signature without its output, no output without its signature."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import FIXTURE, FaultServer, Ground
from test_kill import KILLED, kill_after_the_commit, kill_everywhere

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def signing_ground(server: FaultServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("signing")
    made = ec.generate_private_key(ec.SECP256R1())
    (folder / "key.pem").write_bytes(made.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    to = ["--to", "sharded", "--tp", "2", "--sign", str(folder / "key.pem")]
    yield Ground(folder, server, "folder", FIXTURE, to)


def test_kills_leave_no_half_of_it(signing_ground: Any) -> None:
    """Each end is checked for the very bytes of an undisturbed run, the signature (RFC 6979) among them."""
    ops = signing_ground.operations
    total = len(ops)
    written = [i for i, op in enumerate(ops, 1) if op.endswith("model.sig")]
    seen = kill_everywhere(signing_ground, "kill", sorted({total // 2, *written[1::2], total - 1}))
    assert seen.get("absent", 0) >= 3
    kill_after_the_commit(signing_ground)


def test_what_a_killed_run_has_signed_is_not_left_in_an_unsigned_one(signing_ground: Any) -> None:
    ops = signing_ground.operations
    last = max(i for i, op in enumerate(ops, 1) if op.startswith("pwrite") and op.endswith("model.sig"))
    signing_ground.reset()
    assert signing_ground.run(at=last + 1, do="kill").status == KILLED
    args = signing_ground.args
    signing_ground.args = [word for word in args if word != "--sign" and not word.endswith("key.pem")]
    try:
        assert signing_ground.run().status == 0
        assert not (signing_ground.final / "model.sig").exists()
        assert signing_ground.run("--force").status == 0
    finally:
        signing_ground.args = args
