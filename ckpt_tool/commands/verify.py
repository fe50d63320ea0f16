"""`ckpt verify`: is a checkpoint complete and valid? Headers, extents, cover, replicas, checksums, finite values.

The steps, in this order:

    signatures     the files are compared with what was signed and attested (`signing.checked`), before any is parsed
    headers        every format's own checks, and that the chunks of each tensor cover it (`sources.sound`)
    values         mode "full", the default: checksums, digests, replicas, NaN and Inf, on the CPU or on a device
    other records  mode "full": the checksum of each record of the files that no tensor is read from

Mode "quick" reads headers only and prints the digests that the checkpoint recorded. Files with bytes that no checksum
covers are reported as `uncovered`, since damage there can't be detected.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_tool.conversion.on_device import MEMORY, device_of, threads_of
from ckpt_tool.conversion.unused_options import refuse_unused_reading
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.plurals import agree_all
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import MASTER, LogicalTensor, TensorKey
from ckpt_tool.errors import REPLICAS_DIFFER, CkptError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import Hashing, ranks_of
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Verification
from ckpt_tool.report.holdings import RankOf, rank_name, whose
from ckpt_tool.sources.damaged import Damaged, open_rest, refusal_of
from ckpt_tool.sources.opening import Opened, open_source, resolve, unchanged_sources
from ckpt_tool.sources.sound import UNSOUND, cut_short, damage_noted, finding, findings_of, row
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.records import DAMAGED
from ckpt_tool.storage.source import Tree, unchanged
from ckpt_tool.weight_schemes.quantised_weights import has_codes

if TYPE_CHECKING:
    from ckpt_tool.device.library import Device
    from ckpt_tool.run.rounding import Drift
    from ckpt_tool.signing.checked import Checked

FULL = Verification()
NAMES_SHOWN = 3  # how many tensors of one damaged record a message names


def verify(src: str, reading: Reading, wanted: Verification = FULL, *, progress: Progress) -> dict[str, Any]:
    """The document of `verify --json`: findings, and digests that are independent of the layout.

    An error that keeps the checkpoint from being opened at all is raised, unless other files of it can still be judged.
    """
    on = device_of(wanted.device) if wanted.mode == "full" else None
    # Signatures come first, so that no file is parsed before its hash was compared.
    sealed = _sealed(src, reading, wanted, progress)
    with unchanged(*sealed.trees):  # the bytes that are judged must be those whose hashes were compared
        return _verify_sealed(src, reading, wanted, sealed, on, progress)


def _verify_sealed(
    src: str, reading: Reading, wanted: Verification, sealed: Checked, on: Device | None, progress: Progress
) -> dict[str, Any]:
    """The document, once the files were compared with their signature and attestation (`sealed`)."""
    try:
        opened = open_source(src, reading)
        refuse_unused_reading(reading, opened)
        return _verify_opened(opened, [], reading, wanted, sealed, on, progress)
    except CkptError as e:  # from a header, or from what a reader parses later (such as zarr's shard indexes)
        damaged = open_rest(src, reading, e)
        if damaged is not None:
            return _verify_rest(damaged, reading, wanted, sealed, on, progress)
        if not sealed.faults:
            raise
        return _unopened(src, wanted, sealed, e)


def _verify_opened(
    opened: Opened,
    damage: Sequence[CkptError],
    reading: Reading,
    wanted: Verification,
    sealed: Checked,
    on: Device | None,
    progress: Progress,
) -> dict[str, Any]:
    """The document of an open checkpoint. damage: known damage in files that its catalog does not include."""
    catalog = opened.catalog
    with unchanged_sources(opened):
        findings, broken = findings_of(opened, complete=not damage)
        left_out = damage_noted(catalog)
        beside = _faults_beside(opened, [*damage, *left_out])
        quantised = _quantised_faults(opened, reading, wanted)
        first = [*map(finding, sealed.faults), *map(finding, damage), *map(finding, beside)]
        read = _Read([*first, *findings, *map(finding, quantised)], dict(catalog.digests))
        if wanted.mode == "full":
            _read_all(opened, broken, on, progress, read)
    read.findings = _each_record_once(read.findings)
    _name_ranks(read.findings, opened)
    document = {
        "schema_version": 1,
        "ok": not read.findings,
        "path": opened.path,
        "format": catalog.format,
        "mode": wanted.mode,
        "findings": read.findings,
        "digests": _by_state(read.digests),
        **sealed.said,
        "uncovered": read.uncovered,
        "nonfinite": {key: count for key, count in read.nonfinite.items() if not key.startswith("bool:")},
        "notes": agree_all(
            line.message for line in catalog.notes if line.code not in UNSOUND and line.fault not in left_out
        ),
    }
    refusal = next(filter(None, map(refusal_of, (*left_out, *beside))), None)
    return document if refusal is None else {**document, "refused": refusal}


def _faults_beside(opened: Opened, known: Sequence[CkptError]) -> list[CkptError]:
    """Damage in files that the reader ignored: a scheduler's state, shards next to consolidated files, a tokenizer's
    JSON. `known` is damage that was reported already."""
    taken = {opened.tree.display(path) for path in opened.catalog.files}
    taken |= {fault.path for fault in known if fault.path is not None}
    return list(cut_short(opened.tree, taken))


def _name_ranks(findings: list[dict[str, Any]], opened: Opened) -> None:
    """Add `rank` to each finding in a file that was written by one rank."""
    catalog = opened.catalog
    rank_of = whose(catalog, ranks_of(opened.format, catalog.mesh.to_json()))
    paths = {opened.tree.display(path): path for path in catalog.files}
    _add_ranks(findings, paths, rank_of, opened.tree)


def _add_ranks(findings: list[dict[str, Any]], paths: dict[str, str], rank_of: RankOf, tree: Tree) -> None:
    """Add `rank` to each finding in one of `paths`, and to each in a hidden file or a folder below the root.

    Args:
        paths: displayed path (as in messages) -> path in the tree.
    """
    root = f"{tree.display()}/"
    paths = {**{shown: shown.removeprefix(root) for shown in tree.hidden}, **paths}
    listed = {tree.display(path): path for path in tree.listing()}
    for each in findings:
        file = each["file"] or ""
        coords = None
        if file in paths:
            coords = rank_of(paths[file])
        elif file in listed:
            coords = _rank_in_folder(tree, listed[file])
        if coords:
            each["rank"] = rank_name(coords)


def _rank_in_folder(tree: Tree, path: str) -> Mapping[str, int] | None:
    """The rank of a file of another checkpoint in a subfolder, such as verl's `dist_ckpt/`; None if it has none."""
    folder = path.rpartition("/")[0]
    if not folder:
        return None
    try:
        fmt = registry.detect(tree.below(folder))[0]
    except CkptError:
        return None
    return ranks_of(fmt, {})(path)


def _each_record_once(findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The findings, with a damaged record that several readers met reported only once."""
    kept: list[dict[str, Any]] = []
    met = set[tuple[str | None, int | None]]()
    for each in findings:
        where = (each["file"], each.get("offset"))
        if each["code"] == DAMAGED and where in met:
            continue
        met.add(where)
        kept.append(each)
    return kept


def _verify_rest(
    damaged: Damaged, reading: Reading, wanted: Verification, sealed: Checked, on: Device | None, progress: Progress
) -> dict[str, Any]:
    """The document of a checkpoint with damaged files, each of which is a finding.

    The other files are verified by their values if the reader can go on without the damaged ones, otherwise by their
    checksums alone.
    """
    if damaged.opened is not None:
        document = _verify_opened(damaged.opened, damaged.faults, reading, wanted, sealed, on, progress)
        if damaged.unjudged:
            document["notes"].append(
                f"tensors that were not judged, because a part of them is in what is damaged: {damaged.unjudged}"
            )
        document["notes"] += [f"without what is damaged: {why}" for why in damaged.reasons]
    else:
        document = _verify_checksums(damaged, wanted, sealed)
    if damaged.refused is not None:
        document["refused"] = damaged.refused
    return document


def _verify_checksums(damaged: Damaged, wanted: Verification, sealed: Checked) -> dict[str, Any]:
    """The document of a checkpoint whose reader can't go on without the damaged files: only checksums are checked."""
    from ckpt_tool.run.checksum_cover import look

    tree = damaged.tree
    damaged_files = {fault.path for fault in damaged.faults}
    sizes = {path: size for path, size in tree.listing().items() if size > 0}
    rest = [path for path in sizes if tree.display(path) not in damaged_files]
    looked = look(tree, rest, ()) if wanted.mode == "full" else None
    faults = [*sealed.faults, *damaged.faults, *(looked.damaged if looked is not None else ())]
    findings = [*map(finding, faults)]
    _add_ranks(findings, {tree.display(path): path for path in sizes}, ranks_of(damaged.format, {}), tree)
    uncovered = None
    if looked is not None:
        uncovered = [
            {"file": tree.display(path), "bytes": nbytes, "size": sizes[path]}
            for path, nbytes in looked.uncovered.items()
        ]
    return {
        "schema_version": 1,
        "ok": False,
        "path": tree.shown,
        "format": damaged.format.name,
        "mode": wanted.mode,
        "findings": findings,
        "digests": {},
        **sealed.said,
        "uncovered": uncovered,
        "nonfinite": {},
        "notes": ["what is damaged is needed to read the other files: only their checksums were checked"],
    }


@dataclass(slots=True)
class _Read:
    """What is known about the values: at first from the headers, completed by `_read_all`."""

    findings: list[dict[str, Any]]
    digests: dict[TensorKey, str]
    nonfinite: dict[str, int] = field(default_factory=dict)
    # files with bytes that no checksum covers; None if they were not looked for (mode "quick")
    uncovered: list[dict[str, Any]] | None = None


def _read_all(
    opened: Opened, broken: Container[str | None], on: Device | None, progress: Progress, read: _Read
) -> None:
    """Read every tensor that is not in `broken`, and every other record of the files; the results go to `read`."""
    catalog = opened.catalog
    records = list[CkptError]()

    def note(fault: CkptError) -> None:
        """Collect an error. Damaged records wait, since `_files` can name the tensors in them."""
        if fault.code == DAMAGED:
            records.append(fault)
        else:
            read.findings.append(finding(fault))

    keys = [key for key in catalog.tensors if str(key) not in broken]
    progress.start(sum(catalog.tensors[key].nbytes for key in keys), "verifying")
    if isinstance(opened.format, Hashing):
        for fault in opened.format.late_faults(opened.tree):
            note(fault)
    read.digests, read.nonfinite = _digested(opened, keys, on, progress, note)
    damage, read.uncovered, damaged_tensors = _files(opened, keys, records)
    read.findings += damage
    for key, want in catalog.digests.items():
        if read.digests.get(key, want) != want:
            read.findings.append(_digest_finding(opened, key, read.digests[key]))
    progress.finish()
    _say_how_far(read.findings, opened)
    read.findings += _boolean_findings(read.nonfinite)
    judged = damaged_tensors.union(each["tensor"] for each in read.findings)
    read.findings += _drift_findings(catalog, opened, judged, on)


def _digest_finding(opened: Opened, key: TensorKey, digest: str) -> dict[str, Any]:
    """The finding for a tensor whose values do not have the recorded digest.

    A digest covers the entire tensor, so if several files hold parts of it, any of them may be the damaged one: the
    finding names them all.
    """
    catalog = opened.catalog
    message = f"the values have digest {digest}, recorded was {catalog.digests[key]}"
    paths = sorted({chunk.array.file for chunk in catalog.tensors[key].chunks if chunk.box.numel})
    files = [opened.tree.display(path) for path in paths]
    if len(files) != 1:
        message = f"{message}: the damage is in one of its {len(files)} files"
    return _row_of_files("E0352", message, str(key), files)


def _row_of_files(code: str, message: str, tensor: str, files: list[str]) -> dict[str, Any]:
    """A finding in one of these files: `file` names the only one, `files` all that it may be in."""
    if len(files) == 1:
        return row(code, message, tensor, file=files[0])
    return row(code, message, tensor, files=files)


def _quantised_faults(opened: Opened, reading: Reading, wanted: Verification) -> list[CkptError]:
    """Errors for parts of quantised weights that are missing or do not fit; [] for a checkpoint without codes."""
    # bitsandbytes stores 4-bit codes as columns of shape (n, 1), possibly with the dtype bf16, so dtypes do not suffice
    has_columns = any(row.shape[1:] == (1,) for row in opened.catalog.rows())
    if not has_columns and not has_codes(row.dtype for row in opened.catalog.rows()):
        return []
    from ckpt_tool.quantised.part_faults import faults_of
    from ckpt_tool.quantised.weight_counts import config_of

    return faults_of(opened, config_of(opened, reading), values=wanted.mode == "full")


def _sealed(src: str, reading: Reading, wanted: Verification, progress: Progress) -> Checked:
    """The comparison of the files with their signature and attestation, if there are any.

    The signature is looked for in the given folder, then in the folder that it resolves to (the step of a run).
    """
    from ckpt_tool.signing.checked import Checked, check
    from ckpt_tool.signing.statements import SIGNATURE_FILE

    given = open_tree(src, follow_symlinks=reading.follow_symlinks)
    trees = [given] if given.single is None else []
    with suppress(CkptError):  # the same error is raised again, and reported, when the checkpoint is opened
        trees += [resolve(given, reading)[0]] if trees and not given.exists(SIGNATURE_FILE) else []
    tree = next((tree for tree in trees if tree.single is None and tree.exists(SIGNATURE_FILE)), None)
    if tree is None and wanted.key is None and wanted.attest is None:
        return Checked([], {"signature": None, "attestation": None}, ())
    above = given if tree is not None and tree is not given else None
    return check(tree or given, wanted.key, wanted.attest, progress, contents=wanted.mode == "full", given=above)


def _unopened(src: str, wanted: Verification, sealed: Checked, fault: CkptError) -> dict[str, Any]:
    """The document of a checkpoint that differs from what was signed and can't be opened either."""
    return {
        "schema_version": 1,
        "ok": False,
        "path": src,
        "format": None,
        "mode": wanted.mode,
        "findings": [*map(finding, sealed.faults), finding(fault)],
        "digests": {},
        **sealed.said,
        "uncovered": None,
        "nonfinite": {},
        "notes": [],
    }


def _digested(
    opened: Opened, keys: Sequence[TensorKey], on: Device | None, progress: Progress, note: Callable[[CkptError], None]
) -> tuple[dict[TensorKey, str], dict[str, int]]:
    """The digests of all tensors that can be read, and how many of their values are not finite; errors go to `note`."""
    catalog = opened.catalog
    tree = opened.tree
    if on is not None:
        from ckpt_tool.device.verify import scan_tensors

        return scan_tensors(
            catalog,
            tree,
            on,
            keys=keys,
            threads=threads_of(None),
            memory=MEMORY,
            advance=progress.advance,
            on_fault=note,
        )
    from ckpt_tool.run.scan import digests_of
    from ckpt_tool.run.stats import NonFinite

    bad = NonFinite()
    digests = digests_of(catalog, tree, keys=keys, progress=progress, on_fault=note, also=bad.visit)
    return digests, bad.counts


def _files(
    opened: Opened, keys: Sequence[TensorKey], damaged: Sequence[CkptError]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], set[str]]:
    """Check the records of all files that have a checksum of their own, such as the members of a zip archive.

    Args:
        keys: the tensors that were read; their records need not be read again.
        damaged: the records that were found damaged while these were read.

    Returns:
        The findings for damaged records, the files with bytes that no checksum covers, and the names of the tensors in
        the damaged records.
    """
    from ckpt_tool.run.checksum_cover import look

    catalog = opened.catalog
    tree = opened.tree
    there = tree.listing()
    files = [path for path in dict.fromkeys((*catalog.files, *catalog.sidefiles)) if there.get(path, -1) >= 0]
    holders: dict[tuple[str, int], list[str]] = {}  # (file, offset) of a record -> the tensors in it
    read = set[tuple[str, int]]()
    covered = dict[str, int]()
    for key, tensor in catalog.tensors.items():
        for chunk in tensor.chunks:
            array = chunk.array
            if array.crc is not None and chunk.box.numel:
                names = holders.setdefault((array.path, array.crc[0]), [])
                if not names or names[-1] != str(key):
                    names.append(str(key))
            elif key in catalog.digests:
                covered[array.file] = covered.get(array.file, 0) + array.dtype.nbytes(chunk.box.numel)
    read.update(
        (chunk.array.path, chunk.array.crc[0])
        for key in keys
        for chunk in catalog.tensors[key].chunks
        if chunk.array.crc is not None and chunk.box.numel
    )
    shown = {tree.display(path): path for path in files}
    known = {id(fault): (shown[fault.path or ""], fault.offset or 0) for fault in damaged if fault.path in shown}
    looked = look(tree, files, read, set(known.values()))
    for fault in damaged:
        fault.place = looked.members.get(known.get(id(fault), ("", 0)))
    faults = [*damaged, *looked.damaged]
    damaged_tensors = set[str]()
    for fault in faults:
        names = holders.get((shown.get(fault.path or "", ""), fault.offset or 0), [])
        damaged_tensors.update(names)
        if len(names) > 1:  # tensors that share a storage are views of one record
            fault.key = _first_names(names)
        elif names:
            fault.key = fault.key or names[0]
    whole = opened.format.hashed(tree) if isinstance(opened.format, Hashing) else frozenset[str]()
    left = {path: nbytes - covered.get(path, 0) for path, nbytes in looked.uncovered.items() if path not in whole}
    rows = [
        {"file": tree.display(path), "bytes": nbytes, "size": there[path]}
        for path, nbytes in left.items()
        if nbytes > 0
    ]
    return [finding(fault) for fault in faults], rows, damaged_tensors


def _first_names(names: Sequence[str]) -> str:
    """The first names of a list and how many follow: `a, b, c and 4 more`."""
    hidden = len(names) - NAMES_SHOWN
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def _say_how_far(findings: list[dict[str, Any]], opened: Opened) -> None:
    """Add to the findings on differing replicas by how much they differ.

    The scan that found them stopped at the first difference of each tensor, so these tensors are compared again.
    """
    drifted = {each["tensor"]: each for each in findings if each["code"] == REPLICAS_DIFFER}
    if drifted:
        from ckpt_tool.run import replicas

        tensors = [tensor for key, tensor in opened.catalog.tensors.items() if str(key) in drifted]
        for apart in replicas.among([(tensors, opened.tree)]):
            drifted[apart.name]["message"] = f"replicas differ: {apart.line()}"


def _boolean_findings(counts: dict[str, int]) -> list[dict[str, Any]]:
    return [
        row("W-bool", f"{count} BOOL bytes are neither 0 nor 1", key[5:])
        for key, count in counts.items()
        if key.startswith("bool:")
    ]


def _drift_findings(catalog: Catalog, opened: Opened, skip: set[Any], on: Device | None) -> list[dict[str, Any]]:
    """Findings for parameters whose 16-bit model weights are not the rounded fp32 master weights."""
    if MASTER not in catalog.states():
        return []
    known = frozenset(map(str, skip))
    if on is not None:
        from ckpt_tool.device.drifts import drifts_there

        found = drifts_there(catalog, opened.tree, on, skip=known, threads=threads_of(None), memory=MEMORY)
    else:
        from ckpt_tool.run.rounding import drifts

        found = drifts(catalog, opened.tree, skip=known)
    return [_drift_finding(opened, drift) for drift in found]


def _drift_finding(opened: Opened, drift: Drift) -> dict[str, Any]:
    """The finding for one parameter, with the files that hold its first differing element, of model and master."""
    tensors = opened.catalog.tensors
    keys = (drift.key, drift.key._replace(state=MASTER))
    paths = [_file_of_element(tensors[key], drift.first) for key in keys]
    files = list(dict.fromkeys(opened.tree.display(path) for path in paths if path is not None))
    message = (
        f"{drift.elements} elements are not what the fp32 master weights round to, the first at {list(drift.first)}: "
        "a job that resumes takes the master's"
    )
    return _row_of_files("W-master", message, str(drift.key), files)


def _file_of_element(tensor: LogicalTensor, index: Sequence[int]) -> str | None:
    """The file of the first chunk that holds the element at `index`, None if no chunk does."""
    for chunk in tensor.chunks:
        box = chunk.box
        if all(low <= at < high for low, at, high in zip(box.offset, index, box.end, strict=True)):
            return chunk.array.file
    return None


def _by_state(digests: dict[TensorKey, str]) -> dict[str, dict[str, str]]:
    out: dict[str, dict[str, str]] = {}
    for key, digest in digests.items():
        out.setdefault(key.state, {})[key.name] = digest
    return out
