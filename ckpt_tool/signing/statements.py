"""Statements about the files of a checkpoint: in-toto Statement v1, whose predicate says what is claimed.

    a signature     predicate https://model_signing/signature/v1.0 of OpenSSF model signing, as PyPI's model-signing
                    1.1.1 writes and reads it (`_signing/signing.py`): every file with its digest in `resources`; the
                    subject is the model, its digest the SHA-256 over all digests (as bytes) in that order, which is
                    that of the paths' components
    an attestation  predicate https://slsa.dev/provenance/v1: every file is a subject; `resolvedDependencies` are the
                    sources

The same is read from either: which files, and their hashes (`ListedFile`). This module both writes and reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.errors import CorruptFile

STATEMENT = "https://in-toto.io/Statement/v1"
SIGNATURE = "https://model_signing/signature/v1.0"
BUILD_TYPE = "urn:ckpt-tool:write:v1"  # of an attestation that is written here
PROVENANCE = "https://slsa.dev/provenance/v1"
SIGNATURE_FILE = "model.sig"  # what `model_signing sign` calls it by default
GIT = (".git", ".gitattributes", ".github", ".gitignore")  # what model_signing never looks at
ALGORITHMS = ("sha256", "blake2b")  # hashlib's names, and model_signing's; the third it has, blake3, hashlib lacks


class Digest(NamedTuple):
    """The hash of bytes [start, stop) of a file."""

    path: str
    algorithm: str  # hashlib's name
    hex: str
    start: int = 0
    stop: int | None = None  # None for its end


class ListedFile(NamedTuple):
    """The files that a statement names, and those that it explicitly ignores: files, and complete folders."""

    digests: Sequence[Digest]
    ignored: Sequence[str]

    def ignores(self, path: str) -> bool:
        """Is the file, or a folder above it, ignored by the statement?"""
        return any(path == ignored_path or path.startswith(f"{ignored_path}/") for ignored_path in self.ignored)


def signature(name: str, hashes: Mapping[str, str]) -> bytes:
    """The statement that is signed for a model. hashes: path -> SHA-256 in hex."""
    # The root digest depends on the order of the paths: they are sorted by their parts, not as texts.
    paths = sorted(hashes, key=lambda path: path.split("/"))
    root_digest = hashlib.sha256(b"".join(bytes.fromhex(hashes[path]) for path in paths)).hexdigest()
    predicate = {
        "serialization": {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": [SIGNATURE_FILE, *GIT],
        },
        "resources": [{"name": path, "algorithm": "sha256", "digest": hashes[path]} for path in paths],
    }
    return _text(SIGNATURE, [{"name": name, "digest": {"sha256": root_digest}}], predicate)


def provenance(
    hashes: Mapping[str, str],
    *,
    parameters: Mapping[str, Any],
    internal: Mapping[str, Any],
    sources: Iterable[Mapping[str, Any]],
    byproducts: Iterable[Mapping[str, Any]],
    versions: Mapping[str, str],
    began: str,
    ended: str,
) -> bytes:
    """A statement of provenance. sources, byproducts: resource descriptors of in-toto. began, ended: RFC 3339, UTC."""
    subjects = [{"name": path, "digest": {"sha256": hashes[path]}} for path in sorted(hashes)]
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": dict(parameters),
            "internalParameters": dict(internal),
            "resolvedDependencies": list(sources),
        },
        "runDetails": {
            "builder": {"id": "urn:ckpt-tool", "version": dict(versions)},
            "metadata": {"startedOn": began, "finishedOn": ended},
            "byproducts": list(byproducts),
        },
    }
    return _text(PROVENANCE, subjects, predicate)


def _text(predicate_type: str, subjects: Sequence[Mapping[str, Any]], predicate: Mapping[str, Any]) -> bytes:
    document = {"_type": STATEMENT, "subject": subjects, "predicateType": predicate_type, "predicate": predicate}
    return json.dumps(document, indent=1).encode()


# -- reading -----------------------------------------------------------------------------------------------------------


def list_statement_files(statement: Any, path: str, wanted: str) -> ListedFile:
    """The files of a statement whose predicate is `wanted`. path: of the file, for messages. Raises CorruptFile
    E1683."""
    try:
        kind = statement["_type"]
        predicate_type = statement["predicateType"]
        if kind != STATEMENT or predicate_type != wanted:
            raise _unread(
                path, f"it is {str(kind)[:60]!r} of {str(predicate_type)[:80]!r}, want {STATEMENT} of {wanted}"
            )
        listed_file = _list_signed(statement, path) if wanted == SIGNATURE else _list_attested(statement)
        for digest in listed_file.digests:
            if not isinstance(digest.path, str) or len(bytes.fromhex(digest.hex)) < 16:
                raise ValueError(f"no digest of a file: {str(digest)[:80]}")
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as e:
        raise _unread(path, f"it lacks a part, or one has another kind ({type(e).__name__}: {e})") from e
    names = [digest[:1] + digest[3:] for digest in listed_file.digests]
    if len(set(names)) < len(names) or not names:
        raise _unread(path, "a file appears in it twice" if names else "it names no file")
    return listed_file


def _list_signed(statement: Any, path: str) -> ListedFile:
    predicate = statement["predicate"]
    (subject,) = statement["subject"]
    serialization = predicate["serialization"]
    resources = predicate["resources"]

    if serialization["method"] not in ("files", "shards"):
        raise _unread(
            path, f"files are hashed by the method {str(serialization['method'])[:40]!r}, want files or shards"
        )

    digests = []
    hasher = hashlib.sha256()
    for resource in resources:
        algorithm = resource["algorithm"].partition("-")[0]  # "sha256-sharded-1000000000"
        if algorithm not in ALGORITHMS:
            raise _unread(path, f"files are hashed with {algorithm[:40]!r}, want {' or '.join(ALGORITHMS)}")
        hasher.update(bytes.fromhex(resource["digest"]))
        name = resource["name"]
        start = 0
        stop = None
        if serialization["method"] == "shards":
            name, low, high = name.rsplit(":", 2)
            start = int(low)
            stop = int(high)
        digests.append(Digest(name, algorithm, resource["digest"].lower(), start, stop))

    if hasher.hexdigest() != subject["digest"]["sha256"]:
        raise _unread(path, "its digest of the whole model is not that of the files it names")
    return ListedFile(digests, (*map(str, serialization.get("ignore_paths", ())), SIGNATURE_FILE, *GIT))


def _list_attested(statement: Any) -> ListedFile:
    digests = [
        Digest(resource["name"], "sha256", resource["digest"]["sha256"].lower()) for resource in statement["subject"]
    ]
    return ListedFile(digests, (SIGNATURE_FILE, *GIT))


def _unread(path: str, why: str) -> CorruptFile:
    return CorruptFile(
        f"the statement can't be read: {why}",
        code="E1683",
        path=path,
        hint="get the file again from who signed the checkpoint, or check it with the tool that wrote it",
    )
