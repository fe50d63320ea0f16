"""Signed statements: a DSSE envelope in a sigstore bundle, as `model_signing sign key` of PyPI writes it.

    {"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
     "verificationMaterial": {"publicKey": {"hint": SHA-256 of the key's PEM}, "tlogEntries": []},
     "dsseEnvelope": {"payload": base64, "payloadType": "application/vnd.in-toto+json",
                      "signatures": [{"sig": base64 of DER, "keyid": ""}]}}

The signature is not of the payload but of its pre-authentication encoding, which includes the type:

    DSSEv1 28 application/vnd.in-toto+json 17 {"_type":"..."}..

Sources: model-signing 1.1.1, `_signing/sign_ec_key.py`, `_signing/sign_sigstore_pb.py`; DSSE v1.0.0, protocol.md.
What it does not do: bundles of certificates and of sigstore's own identities, whose roots of trust `model_signing`
brings.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from binascii import Error
from typing import Any, NamedTuple

from ckpt_tool.errors import CorruptFile
from ckpt_tool.signing.keys import PrivateKey, PublicKey
from ckpt_tool.storage.texts.strict_json import parse

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
LIMIT = 256 << 20  # bytes of a bundle or a statement: a million files take 200 MB
VALUES = 8_000_000  # of a statement: five a file
_HINT = "get the file again from who signed the checkpoint"


class Signed(NamedTuple):
    """A statement with its signature."""

    payload: bytes
    signature: bytes
    hint: str  # SHA-256 of the key that the bundle names, "" if it names none

    def by(self, key: PublicKey) -> str:
        """The reason why the signature is not by this key, "" if it is."""
        if key.made(self.signature, _encode_envelope(self.payload)):
            return ""
        if self.hint and self.hint != key.hint:
            return f"it is by another key: {self.hint[:16]}..., and the one given is {key.hint[:16]}..."
        return "the signature is not by this key, or what was signed has been changed"


def sign(payload: bytes, key: PrivateKey) -> bytes:
    """Sign a statement, and return it as a bundle."""
    signature = {"sig": b64encode(key.sign(_encode_envelope(payload))).decode(), "keyid": ""}
    envelope = {"payload": b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE, "signatures": [signature]}
    material = {"publicKey": {"hint": key.public.hint}, "tlogEntries": list[Any]()}
    bundle = {"mediaType": MEDIA_TYPE, "verificationMaterial": material, "dsseEnvelope": envelope}
    return json.dumps(bundle, separators=(",", ":")).encode()


def is_bundle(document: Any) -> bool:
    """Does the document claim to be a bundle? Others are bare statements."""
    return isinstance(document, dict) and ("mediaType" in document or "dsseEnvelope" in document)


def unpack_bundle(document: Any, path: str) -> Signed:
    """A bundle's statement and signature, not verified yet. Raises CorruptFile E1683."""
    try:
        if document["mediaType"] != MEDIA_TYPE:
            raise _unread(path, f"the media type is {str(document['mediaType'])[:80]!r}, want {MEDIA_TYPE}")
        envelope = document["dsseEnvelope"]
        material = document["verificationMaterial"]
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise _unread(path, f"the payload is {str(envelope['payloadType'])[:80]!r}, want {PAYLOAD_TYPE}")
        if not isinstance(material.get("publicKey"), dict):
            raise _unread(path, "it is signed with a certificate or an identity, and keys alone are read")
        signatures = envelope["signatures"]
        if len(signatures) != 1:
            raise _unread(path, f"it has {len(signatures)} signatures, want one")
        payload = b64decode(envelope["payload"], validate=True)
        signature = b64decode(signatures[0]["sig"], validate=True)
        hint = material["publicKey"].get("hint") or ""
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, Error) as e:
        raise _unread(path, f"it lacks a part of a bundle, or one has another kind ({type(e).__name__}: {e})") from e
    return Signed(payload, signature, str(hint))


def document_of(raw: bytes, path: str) -> Any:
    """A bundle or a statement as JSON. Raises CorruptFile."""
    return parse(raw, path=path, limit=VALUES)


def _unread(path: str, why: str) -> CorruptFile:
    """The error E1683 for a malformed bundle."""
    return CorruptFile(f"the signature can't be read: {why}", code="E1683", path=path, hint=_HINT)


def _encode_envelope(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding, which is what keys sign."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
