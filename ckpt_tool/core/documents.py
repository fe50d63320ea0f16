"""What the Python functions return and `--json` prints, as types: for editors, type checkers and readers.

    result: WriteResult = ckpt.convert("runs/7", "out", to="safetensors")
    result["plan"]["bytes_written"]

At run time they are plain dicts, ready for `json.dumps`. A key that is not always there is `NotRequired`. Keys may be
added later; none that is here goes away or changes its meaning within one `schema_version`.
`tests/commands/test_python_results.py` compares real documents with these types.
"""

# no `from __future__ import annotations`: NotRequired would not be seen, and every key would be called required
import sys
from typing import Any, Literal

if sys.version_info >= (3, 11):
    from typing import NotRequired, TypedDict
else:  # Python 3.10 has neither NotRequired nor a TypedDict that knows it
    from typing_extensions import NotRequired, TypedDict

# -- inspect -----------------------------------------------------------------------------------------------------------


class Total(TypedDict):
    """What a checkpoint holds, all states together."""

    tensors: int
    bytes: int
    parameters: int  # elements of the model; of quantised weights, those that the codes encode


class StateTotal(TypedDict):
    """What one state holds: `model`, `master`, `exp_avg`, ..."""

    tensors: int
    bytes: int


class ChunkEntry(TypedDict):
    """A part of a tensor, with `placement=True`."""

    file: str
    offset: list[int]  # where it begins in the tensor
    shape: list[int]
    rank: dict[str, int]  # mesh dim -> coordinate; {} where the file is no rank's


class TensorStatistics(TypedDict):
    """What the values of a tensor are like, with `stats=True`. None where there are no finite values."""

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    zeros: int
    nan: int
    inf: int


class TensorEntry(TypedDict):
    """A tensor of one state."""

    name: str
    state: str
    dtype: str
    shape: list[int]
    bytes: int
    chunks: NotRequired[list[ChunkEntry]]
    stats: NotRequired[TensorStatistics | None]
    file: NotRequired[str]  # where the files of an incomplete checkpoint are read one by one


class Quantisation(TypedDict):
    """How a model's weights are quantised."""

    scheme: str
    weights: int
    parameters: int
    bytes: int
    blocks: list[list[int]] | list[tuple[int, ...]]
    bits: list[int]
    dequantizes: bool
    why: NotRequired[str]
    faults: NotRequired[list[str]]


class PickleEntry(TypedDict):
    """A pickle of the checkpoint, with `security=True`."""

    file: str
    member: str
    globals: list[str]
    unsafe: list[str]
    unseen: str  # why a part of it could not be looked at, "" where all was


class Security(TypedDict):
    """Which names the pickles mention. Nothing is ever run."""

    unsafe: list[str]
    globals: list[str]
    files: NotRequired[list[PickleEntry]]


class DeltaAbout(TypedDict):
    """A delta: the changes from one version to the next."""

    version: int
    base_version: int
    encoding: str
    compression: str
    checksum: str
    tensors: NotRequired[int]
    bytes: NotRequired[int]
    changed: NotRequired[int]
    unchanged: NotRequired[int]
    changed_bytes: NotRequired[int]
    archive: NotRequired[str]


class MissingFile(TypedDict):
    """A file that an incomplete checkpoint lacks. None where nothing says how much it held."""

    path: str
    rank: dict[str, int]
    tensors: int | None
    bytes: int | None


class MissingTensor(TypedDict):
    """A tensor of which a part is in a missing file."""

    name: str
    state: str
    bytes: int | None


class ErrorEntry(TypedDict):
    """An error, as `--json` prints it on stderr."""

    code: str
    exit_code: int
    message: str
    path: str | None
    offset: int | None
    place: str | None
    tensor: str | None
    hint: str | None
    faults: list[str]


class MissingSummary(TypedDict):
    """What an incomplete checkpoint lacks, with `lenient=True` and in `--json`."""

    files: list[MissingFile]
    tensors: list[MissingTensor]
    bytes: int | None
    error: ErrorEntry  # that of every other verb
    lenient: bool


class InspectResult(TypedDict):
    """What `ckpt.inspect` returns."""

    schema_version: int
    format: str
    path: str
    resolved: str  # which checkpoint of the folder was taken, in words; "" where there is no choice
    mesh: dict[str, int]
    total: Total
    states: dict[str, StateTotal]
    tensors: list[TensorEntry]
    extras: dict[str, Any]
    notes: list[str]
    metadata: NotRequired[dict[str, Any]]
    quantization: NotRequired[Quantisation]
    security: NotRequired[Security]
    delta: NotRequired[DeltaAbout]
    anonymous: NotRequired[bool]  # with `anonymous=True`: words of names are hashed, paths and values left out
    missing: NotRequired[MissingSummary]


# -- convert, reshard, merge, patch, plan, apply, delta ----------------------------------------------------------------


class PlanSummary(TypedDict):
    """What a run moves. None in the plan of a delta, whose size depends on the values."""

    bytes_read: int
    bytes_written: int | None
    peak_memory: int
    files: int | None
    copies: int


class Fallback(TypedDict):
    """Tensors that are not cut as was asked for, because a dim does not divide."""

    requested: list[str]
    used: list[str]
    better: list[str]
    shape: list[int]
    reason: str
    tensors: int
    example: str
    extra_bytes: int


class RemovedTensor(TypedDict):
    """A tensor that `remove_keys` or `keep_keys` left out."""

    name: str
    state: str
    bytes: int


class DroppedState(TypedDict):
    """What was not written, and why."""

    state: str
    tensors: int
    bytes: int
    reason: str
    names: NotRequired[list[str]]


class SourceEntry(TypedDict):
    """What was read."""

    path: str
    format: NotRequired[str]
    resolved: NotRequired[str]
    paths: NotRequired[list[str]]  # where there are several


class FileEntry(TypedDict):
    """A file of the output."""

    path: str
    bytes: int


class TargetEntry(TypedDict):
    """What is written."""

    path: str
    format: str
    files: list[FileEntry]  # the first 10,000
    mesh: NotRequired[dict[str, int]]


class Replaced(TypedDict):
    """What `force=True` replaces."""

    files: int
    bytes: int
    names: list[str]


CastOnCpu = TypedDict("CastOnCpu", {"tensors": int, "from": str, "to": str})


class DeviceEntry(TypedDict):
    """The GPU of `device="cuda"`."""

    name: str
    pinned_memory: int
    device_memory: int
    left_to_cpu: NotRequired[list[CastOnCpu]]


class QuantisedWeights(TypedDict):
    """What `quantize` did."""

    scheme: str
    weights: int
    stays: dict[str, int]  # why weights stay as they are -> how many
    errors: list[dict[str, Any]]  # how far each weight is from what it was; [] before it is written


class NameEntry(TypedDict):
    """What names of the source become in another dialect; `*` is a placeholder for a number."""

    source: str
    target: list[str]
    tensors: int


class WriteResult(TypedDict):
    """What `ckpt.convert`, `reshard`, `merge` and `patch` return, and `ckpt.plan` and `ckpt.apply` too.

    `elapsed_s` and `digest_checked` are there once something was written.
    """

    schema_version: int
    source: SourceEntry
    target: TargetEntry
    plan: PlanSummary
    states: NotRequired[dict[str, StateTotal]]
    layout_source: NotRequired[str]
    fallbacks: list[Fallback]
    removed: list[RemovedTensor]
    removed_bytes: int
    dropped: list[DroppedState]
    notes: list[str]
    names: NotRequired[list[NameEntry]]  # between dialects
    elapsed_s: NotRequired[float]
    digest_checked: NotRequired[bool]
    overflows: NotRequired[dict[str, int]]  # values that a cast could not hold, by tensor
    replaces: NotRequired[Replaced]
    plan_file: NotRequired[str]
    job_file: NotRequired[str]
    signature: NotRequired[str]
    attestation: NotRequired[str]
    device: NotRequired[DeviceEntry]
    chain: NotRequired[list[DeltaAbout]]  # of `patch`, whose deltas are files of training steps
    quantized: NotRequired[QuantisedWeights]  # with `quantize`


class ApplyResult(WriteResult):
    """What `ckpt.apply` returns."""

    committed: NotRequired[bool]
    already_committed: NotRequired[bool]
    part: NotRequired[list[int]]  # [i, n] of a share
    parts: NotRequired[dict[str, list[int]]]  # `done`, `running`, `dead`, `missing` -> shares


class DeltaResult(TypedDict):
    """What `ckpt.delta` returns."""

    schema_version: int
    source: SourceEntry
    target: TargetEntry
    delta: DeltaAbout
    plan: PlanSummary
    fallbacks: list[Fallback]
    removed: list[RemovedTensor]
    removed_bytes: int
    dropped: list[DroppedState]
    notes: list[str]
    elapsed_s: NotRequired[float]
    digest_checked: NotRequired[bool]
    replaces: NotRequired[Replaced]


# -- diff --------------------------------------------------------------------------------------------------------------


class Difference(TypedDict):
    """A tensor that differs."""

    name: str
    state: str
    kind: Literal["value", "shape", "dtype", "missing_left", "missing_right"]
    first_index: NotRequired[list[int]]
    max_ulp: NotRequired[int | None]
    max_abs: NotRequired[float | None]
    elements: NotRequired[int]
    rel_l2: NotRequired[float | None]
    cosine: NotRequired[float | None]
    left: NotRequired[list[int] | str]  # the shape or the dtype, where it is what differs
    right: NotRequired[list[int] | str]
    values_equal: NotRequired[bool]  # of two dtypes: are the numbers equal?


class WorstTensor(TypedDict):
    """The tensor of a group whose values differ most."""

    name: str
    rel_l2: float | None
    cosine: float | None
    max_abs: float | None
    max_ulp: int | None


class WorstOfTwoDtypes(TypedDict):
    """The tensor of a group whose values, of two dtypes, differ most as numbers."""

    name: str
    rel_l2: float | None
    cosine: float | None
    max_abs: float | None


class DifferenceGroup(TypedDict):
    """The tensors of one state whose names are equal but for numbers."""

    state: str
    pattern: str
    names: dict[str, str]
    tensors: int
    equal: int
    changed: int
    other_shape: int
    other_dtype: int
    dtypes: NotRequired[list[str]]  # the pairs of dtypes of those counted by `other_dtype`
    equal_values: NotRequired[int]  # how many of these are equal as numbers
    dtype_worst: NotRequired[WorstOfTwoDtypes | None]
    only_left: int
    only_right: int
    rel_l2: float | None
    cosine: float | None
    max_abs: float | None
    max_ulp: int | None
    elements: int
    nonfinite: int
    worst: WorstTensor | None


class LayerDifference(TypedDict):
    """A layer (`model.layers.3`) in which values differ. The norms are those of its changed tensors together."""

    state: str
    layer: str
    changed: int
    rel_l2: float | None
    cosine: float | None
    max_abs: float | None


class RankDifference(TypedDict):
    """A file that holds values which differ, with `rank=True`."""

    side: Literal["first", "second"]
    file: str
    rank: str
    tensors: int
    elements: int
    max_abs: float | None


class DiffResult(TypedDict):
    """What `ckpt.diff` returns."""

    schema_version: int
    equal: bool
    compared: int
    differences: list[Difference]
    summary: list[DifferenceGroup]  # worst first
    by_layer: list[LayerDifference]  # worst first
    suggestion: str | None  # the option that would make the names match
    left: str
    right: str
    extras_differ: list[str]
    notes: list[str]
    by_rank: NotRequired[list[RankDifference]]


# -- verify, audit -----------------------------------------------------------------------------------------------------


class Finding(TypedDict):
    """What `ckpt.verify` finds wrong."""

    code: str
    message: str
    file: str | None
    tensor: str | None
    offset: NotRequired[int | None]
    place: NotRequired[str | None]
    rank: NotRequired[str]
    count: NotRequired[int]
    files: NotRequired[list[str]]  # where the damage is in one of several and nothing says in which


class RefusedFinding(Finding):
    """A finding for which every other verb refuses the checkpoint: the command ends with exit code 4."""

    hint: str


class SignedEntry(TypedDict):
    """A signature or an attestation."""

    file: str
    files: int
    signed: bool
    key: str | None
    authentic: bool | None  # None where no key was given to check it with
    ignored: NotRequired[list[str]]
    outside: NotRequired[list[str]]  # files next to the signed folder that a reader uses


class UncoveredFile(TypedDict):
    """A file with bytes that no checksum covers: damage there can't be seen."""

    file: str
    bytes: int
    size: int


class VerifyResult(TypedDict):
    """What `ckpt.verify` returns."""

    schema_version: int
    ok: bool
    path: str
    format: str | None
    mode: str
    findings: list[Finding]
    digests: dict[str, dict[str, str]]  # state -> tensor -> digest, the same in every format and layout
    signature: SignedEntry | None
    attestation: SignedEntry | None
    uncovered: list[UncoveredFile] | None  # None if this was not checked
    nonfinite: dict[str, int]  # tensor -> values that are NaN or Inf
    notes: list[str]
    refused: NotRequired[RefusedFinding]


class SeenIn(TypedDict):
    """Where a finding is known from."""

    name: str
    url: str


class AuditFinding(TypedDict):
    """What `ckpt.audit` finds."""

    code: str
    severity: Literal["error", "warning", "suspicion"]
    title: str
    message: str
    file: str | None
    tensor: str | None
    do: str
    seen: list[SeenIn]


class AuditResult(TypedDict):
    """What `ckpt.audit` returns."""

    schema_version: int
    ok: bool
    path: str
    format: str | None
    family: str | None
    tensors: int
    values: bool
    findings: list[AuditFinding]
    notes: list[str]


# -- latest, prune, status ---------------------------------------------------------------------------------------------


class PassedOver(TypedDict):
    """A newer step that is not complete."""

    path: str
    step: int | None
    why: str
    codes: list[str]


class Pointer(TypedDict):
    """A file that names a step."""

    file: str
    names: str


class LatestResult(TypedDict):
    """What `ckpt.latest` returns."""

    schema_version: int
    run: str
    path: str | None  # None where no step is complete
    step: int | None
    passed_over: list[PassedOver]
    pointers: list[Pointer]
    notes: list[str]


class StepEntry(TypedDict):
    """A step of a run."""

    path: str
    step: int | None
    sound: bool | None  # None where it was not looked at
    bytes: int | None
    reasons: NotRequired[list[str]]  # why it stays
    why: NotRequired[str]  # why it is not complete
    removed: NotRequired[bool]


class PruneResult(TypedDict):
    """What `ckpt.prune` returns."""

    schema_version: int
    run: str
    dry_run: bool
    last_sound: str | None
    keep: list[StepEntry]
    remove: list[StepEntry]
    freed_bytes: int


class PartEntry(TypedDict):
    """A process that writes, or wrote, a share of an output."""

    part: list[int] | None
    worker: NotRequired[str]
    state: str
    units: int
    of_units: int
    bytes: int
    of_bytes: int
    bytes_per_s: int
    seconds_left: int | None
    process: str
    last_line: float


class StatusResult(TypedDict):
    """What `ckpt.status` returns."""

    schema_version: int
    path: str
    state: Literal["written", "growing"]
    bytes: int
    of_bytes: int
    bytes_per_s: int
    seconds_left: int | None
    running: int
    missing: list[int]
    parts: list[PartEntry]


RESULTS = (
    "ApplyResult",
    "AuditResult",
    "DeltaResult",
    "DiffResult",
    "InspectResult",
    "LatestResult",
    "PruneResult",
    "StatusResult",
    "VerifyResult",
    "WriteResult",
)
