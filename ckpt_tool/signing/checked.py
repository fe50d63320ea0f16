"""Compares a checkpoint with its signature and its attestation, for `ckpt verify`.

    model.sig in the folder     compared whenever values are read; with `--key` the signer is checked, too
    --attest FILE               the same for an attestation, wherever it is stored

A statement names every file: one that differs, one that is missing and one that it does not name are findings, and so
is a signature by another key. Without a key the hashes alone are compared, which shows damage and no forgery; the
document says so (`authentic` is None). Cost: one read of all files, by a few threads; none in `quick` mode.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckpt_tool.core.progress import Progress, working_on
from ckpt_tool.errors import CkptError, CorruptFile, Incomplete, InconsistentCheckpoint, wrap_os_error
from ckpt_tool.formats.hub_folder.model_files import tokenizer_files
from ckpt_tool.formats.hub_folder.modules import module_files
from ckpt_tool.run.scan import each_of
from ckpt_tool.signing import bundle
from ckpt_tool.signing.keys import PublicKey, public_key
from ckpt_tool.signing.statements import PROVENANCE, SIGNATURE, SIGNATURE_FILE, Digest, ListedFile, list_statement_files
from ckpt_tool.storage.source import Tree

_BLOCK = 1 << 20  # bytes read at a time
_Have = Mapping[tuple[str, str, int, int | None], str]


class Checked(NamedTuple):
    """The result of the comparison, which takes place before the checkpoint is opened."""

    faults: list[CkptError]
    said: dict[str, dict[str, Any] | None]  # `signature` and `attestation` for the document, None if there is none
    trees: tuple[Tree, ...]  # trees whose files were hashed: they may not change before they are read


class _Claim(NamedTuple):
    """A statement that was read, and the files that it names."""

    name: str  # what messages call it
    files: ListedFile
    own: str | None  # its own file, if that is inside the tree
    said: dict[str, Any]  # its entry in the document that `--json` prints


def check(
    tree: Tree,
    key_file: str | None,
    attestation: str | None,
    progress: Progress,
    *,
    contents: bool,
    given: Tree | None = None,
) -> Checked:
    """Compare the files of `tree` with the statements.

    Args:
        contents: hash the files; else their names alone are compared.
        given: the folder whose pointer file led to the tree, if one did.

    Raises UsageError E1680, E1681 of the key, StorageError.
    """
    key = public_key(key_file) if key_file is not None else None
    faults = list[CkptError]()
    claims = list[_Claim]()
    statements: dict[str, dict[str, Any] | None] = {"signature": None, "attestation": None}
    sealed = tree.single is None and tree.exists(SIGNATURE_FILE)
    if sealed:
        raw = tree.read_whole(SIGNATURE_FILE, limit=bundle.LIMIT)
        signature_path = tree.display(SIGNATURE_FILE)
        statements["signature"] = _take(raw, signature_path, SIGNATURE, key, SIGNATURE_FILE, claims, faults)
    if attestation is not None:
        attestation_path = _relative_to_tree(tree, attestation)
        statements["attestation"] = _take(
            _read(attestation), attestation, PROVENANCE, key, attestation_path, claims, faults
        )
    if key is not None:
        faults += _find_unsigned(statements, claims, tree.display(SIGNATURE_FILE))
    if claims:
        have = _hashes(tree, claims, progress) if contents else None
        for claim in claims:
            faults += _compare_files(tree, claim, have)
            ignored = _list_ignored(tree, claim)
            if ignored:
                claim.said["ignored"] = ignored
            outside = _list_outside(tree, given) if given is not None else []
            if outside:
                claim.said["outside"] = outside
    return Checked(faults, statements, (tree,))


def _find_unsigned(said: Mapping[str, dict[str, Any] | None], claims: list[_Claim], path: str) -> Iterator[CkptError]:
    """The fault if `--key` was given but nothing is signed, or an attestation is neither signed itself nor one of the
    signed files."""
    signature = said["signature"]
    attested = said["attestation"]
    if not any(statement and statement["signed"] for statement in (signature, attested)):
        yield _nothing("nothing here is signed", path)
    elif attested and not attested["signed"]:
        signed = {digest.path for claim in claims if claim.own == SIGNATURE_FILE for digest in claim.files.digests}
        if not any(claim.own in signed for claim in claims):
            yield _nothing("the attestation is not signed", attested["file"])


def _nothing(why: str, path: str) -> Incomplete:
    """The error E1688 for a check by key without anything signed."""
    return Incomplete(
        f"{why}, so that --key can't show who made it",
        code="E1688",
        path=path,
        hint="it was written without --sign, or a file was left out: get it with all its files",
    )


def _take(
    raw: bytes,
    path: str,
    wanted: str,
    key: PublicKey | None,
    own: str | None,
    claims: list[_Claim],
    faults: list[CkptError],
) -> dict[str, Any]:
    """Read a statement, signed or not, into `claims`. Returns its entry in the document; faults go to `faults`."""
    said: dict[str, Any] = {"file": path, "files": 0, "signed": False, "key": None, "authentic": None}
    try:
        statement = bundle.document_of(raw, path)
        if bundle.is_bundle(statement) or wanted == SIGNATURE:
            said["signed"] = True
            signed = bundle.unpack_bundle(statement, path)
            said["key"] = signed.hint or None
            statement = bundle.document_of(signed.payload, path)
            reason = signed.by(key) if key is not None else ""
            said["authentic"] = None if key is None else not reason
            if reason:
                hint = "if the key is the right one, the checkpoint is not from whom it is said to be: do not use it"
                faults.append(CorruptFile(reason, code="E1684", path=path, hint=hint))
        files = list_statement_files(statement, path, wanted)
    except CorruptFile as e:
        faults.append(e)
        return said
    said["files"] = len({digest.path for digest in files.digests})
    claims.append(_Claim(path, files, own, said))
    return said


def _read(path: str) -> bytes:
    """The bytes of an attestation, up to the largest size that is accepted."""
    try:
        with open(path, "rb") as file:
            return file.read(bundle.LIMIT)
    except OSError as e:
        raise wrap_os_error(e, path, "reading the attestation") from e


def _relative_to_tree(tree: Tree, path: str) -> str | None:
    """The file as a path below the tree, None if it is elsewhere."""
    if not tree.local:
        return None
    inner = os.path.relpath(os.path.realpath(path), os.path.realpath(tree.root))
    return None if inner.startswith(os.pardir) else inner


def _hashes(tree: Tree, claims: list[_Claim], progress: Progress) -> _Have:
    """What each part of a file that a claim names hashes to, for the files that are there."""
    there = tree.listing()
    wanted = {
        (digest.path, digest.algorithm, digest.start, digest.stop): None
        for claim in claims
        for digest in claim.files.digests
        if there.get(digest.path, -1) >= (digest.stop or 0)
    }
    parts = sorted(wanted, key=lambda part: (part[0], part[2]))
    progress.start(sum((part[3] or there[part[0]]) - part[2] for part in parts), "hashing what was signed")
    found = dict[tuple[str, str, int, int | None], str]()

    def one(number: int) -> None:
        path, algorithm, start, stop = parts[number]
        working_on(progress, path)
        digest = hashlib.new(algorithm)
        end = there[path] if stop is None else stop
        for at in range(start, end, _BLOCK):
            data = tree.read(path, at, min(_BLOCK, end - at))
            digest.update(data)
            progress.advance(len(data))
        found[parts[number]] = digest.hexdigest()

    each_of(len(parts), one)
    progress.finish()
    return found


def _compare_files(tree: Tree, claim: _Claim, have: _Have | None) -> Iterator[CkptError]:
    """What differs between the files that are there and those that a claim names. have: None where none was hashed."""
    listing = tree.listing()
    parts = defaultdict[str, list[Digest]](list)
    for digest in claim.files.digests:
        parts[digest.path].append(digest)

    for path, digests in sorted(parts.items()):
        if path not in listing:
            yield Incomplete(
                f"{path} is missing: {claim.name} names it",
                code="E1686",
                path=tree.display(path),
                hint="fetch the file from where the checkpoint comes from",
            )
        elif difference := _differs(digests, listing[path], have):
            yield CorruptFile(
                f"{path} is not what {claim.name} names: {difference}",
                code="E1685",
                path=tree.display(path),
                hint="it was damaged or changed after it was written: get it again",
            )

    # What the listing does not show is there all the same: a folder of which nothing is signed is named as a whole.
    for path in (*listing, *tree.left_out):
        if path not in parts and path != claim.own and not claim.files.ignores(path):
            suffix = f" ({tree.left_out[path]})" if path in tree.left_out else ""
            yield InconsistentCheckpoint(
                f"{path}{suffix} is not among the files that {claim.name} names",
                code="E1687",
                path=tree.display(path),
                hint="it was added after the checkpoint was written: remove it, or find out where it comes from",
            )


def _list_ignored(tree: Tree, claim: _Claim) -> list[str]:
    """The files in the tree that a statement never covers, by its own list or by the rules of model signing. They are
    reported, since whoever trusts the folder has to know that no signature is about them."""
    uncovered = (path for path in tree.listing() if path not in (claim.own, SIGNATURE_FILE))
    return [path for path in uncovered if claim.files.ignores(path)]


def _list_outside(tree: Tree, given: Tree) -> list[str]:
    """The files next to the signed folder that a reader of the given folder uses or copies, as messages show them: the
    pointer file, a config, a tokenizer. A statement about a folder below can't name them."""
    used = dict.fromkeys((*given.names(), *module_files(given), *tokenizer_files(given)))
    signed = f"{tree.display()}/"
    return [shown for shown in map(given.display, used) if not shown.startswith(signed)]


def _differs(digests: list[Digest], size: int, have: _Have | None) -> str:
    """How a file is not what its digests say; "" where it is."""
    if size < 0:
        return "it is no regular file, or a link that is not followed"
    position = 0
    for digest in sorted(digests, key=lambda digest: digest.start):
        stop = size if digest.stop is None else digest.stop
        if digest.start != position or stop < position:
            return f"bytes from {position} on are in no part that is named"
        if stop > size:
            return f"it has {size} bytes, and {stop} were there"
        position = stop
        digest_found = None if have is None else have.get((digest.path, digest.algorithm, digest.start, digest.stop))
        if digest_found is not None and digest_found != digest.hex:
            return f"its {digest.algorithm.upper()} is {digest_found[:16]}..., and was {digest.hex[:16]}..."
    return "" if position == size else f"it has {size} bytes, and {position} were there"
