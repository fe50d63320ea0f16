"""Is a file one that `--sign` or `--attest` wrote? Asked before such a file is replaced.

The answer is in the content: an in-toto statement of the two kinds that are written here, bare or in a bundle. Nothing
is verified: who signed it does not matter, only that it is no key, no source and no notes of the user's.
"""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

from ckpt_tool.signing.bundle import MEDIA_TYPE
from ckpt_tool.signing.statements import BUILD_TYPE, PROVENANCE, SIGNATURE, STATEMENT

_STARTS = (  # how a statement and a bundle begin, as `statements` and `bundle` write them
    b'{\n "_type": "' + STATEMENT.encode() + b'"',
    b'{"mediaType":"' + MEDIA_TYPE.encode() + b'"',
)


def is_statement(raw: bytes) -> bool:
    """Is it a signature of a folder or an attestation of an output, signed or not?"""
    document = _parse_object(raw)
    envelope = document.get("dsseEnvelope")
    if isinstance(envelope, dict):
        document = _payload(envelope)
    return document.get("_type") == STATEMENT and document.get("predicateType") in (PROVENANCE, SIGNATURE)


def is_attestation(raw: bytes) -> bool:
    """Is it an attestation that `--attest` wrote, signed or not? One of another builder is theirs."""
    document = _parse_object(raw)
    envelope = document.get("dsseEnvelope")
    if isinstance(envelope, dict):
        document = _payload(envelope)
    predicate = document.get("predicate")
    definition = predicate.get("buildDefinition") if isinstance(predicate, dict) else None
    kind = definition.get("buildType") if isinstance(definition, dict) else None
    return document.get("predicateType") == PROVENANCE and kind == BUILD_TYPE


def is_begun(raw: bytes) -> bool:
    """Is it the beginning of a statement or of a bundle, as a run that was killed leaves it?"""
    return any(raw.startswith(start[: len(raw)]) for start in _STARTS)


def _payload(envelope: dict[str, Any]) -> dict[str, Any]:
    try:
        return _parse_object(b64decode(str(envelope.get("payload")), validate=True))
    except ValueError:
        return {}


def _parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object, {} for anything else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
