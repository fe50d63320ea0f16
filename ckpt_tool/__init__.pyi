# The functions of `ckpt_tool.api` with their options, types and docstrings, by tests/derive_tables.py
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike

from ckpt_tool.core.documents import ApplyResult as ApplyResult
from ckpt_tool.core.documents import AuditResult as AuditResult
from ckpt_tool.core.documents import DeltaResult as DeltaResult
from ckpt_tool.core.documents import DiffResult as DiffResult
from ckpt_tool.core.documents import InspectResult as InspectResult
from ckpt_tool.core.documents import LatestResult as LatestResult
from ckpt_tool.core.documents import PruneResult as PruneResult
from ckpt_tool.core.documents import StatusResult as StatusResult
from ckpt_tool.core.documents import VerifyResult as VerifyResult
from ckpt_tool.core.documents import WriteResult as WriteResult
from ckpt_tool.core.progress import SILENT
from ckpt_tool.core.progress import Progress as Progress
from ckpt_tool.core.progress import Silent as Silent
from ckpt_tool.errors import CkptError as CkptError
from ckpt_tool.errors import CorruptFile as CorruptFile
from ckpt_tool.errors import Incomplete as Incomplete
from ckpt_tool.errors import InconsistentCheckpoint as InconsistentCheckpoint
from ckpt_tool.errors import InputError as InputError
from ckpt_tool.errors import InternalError as InternalError
from ckpt_tool.errors import Interrupted as Interrupted
from ckpt_tool.errors import OutputExists as OutputExists
from ckpt_tool.errors import ReplicasDiffer as ReplicasDiffer
from ckpt_tool.errors import SourceChanged as SourceChanged
from ckpt_tool.errors import StorageError as StorageError
from ckpt_tool.errors import Unexplained as Unexplained
from ckpt_tool.errors import UnknownFormat as UnknownFormat
from ckpt_tool.errors import UnmappedTensor as UnmappedTensor
from ckpt_tool.errors import UnsafeInput as UnsafeInput
from ckpt_tool.errors import UsageError as UsageError
from ckpt_tool.run.lazy import LazyTensor as LazyTensor
from ckpt_tool.run.lazy import OpenCatalog as OpenCatalog

__version__: str
StrPath = str | PathLike[str]

def open(
    path: StrPath,
    from_format: str | None = None,
) -> OpenCatalog:
    r"""Open a checkpoint of any format. Headers are read now, values when a tensor is asked for them.

        checkpoint = ckpt.open("runs/7")
        checkpoint["model.norm.weight"].numpy()
        checkpoint.state("exp_avg")["model.norm.weight"][:16].torch()

    Args:
        path: a file, a folder or a URL.
        from_format: read it as this format instead of detecting it: "dcp".

    Returns:
        A mapping of the names of the model's tensors to `LazyTensor`s; `state(name)` gives other states.

    Raises:
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
    """

def apply(
    plan: StrPath,
    *,
    progress: Progress = SILENT,
    part: str | tuple[int, int] | None = None,
    claim: bool = False,
    force: bool = False,
    resume: bool | None = True,
    fsync: bool | None = True,
    dry_run: bool = False,
    memory: int | str | None = 1073741824,
    threads: int | str | None = None,
    verify: str | None = "quick",
    ray: str | PathLike[str] | None = None,
    emit: tuple[str, str] | None = None,
    sign: str | PathLike[str] | None = None,
    attest: str | PathLike[str] | None = None,
    device: str | None = "cpu",
    pinned: int | str | tuple[int, int] | None = None,
) -> ApplyResult:
    r"""Run a saved plan, or one share of it; the last share to finish puts the output in its place.

        ckpt.apply("plan.json")
        ckpt.apply("plan.json", part="3/8")

    Args:
        plan: the file that `ckpt.plan`, or `plan=` of another function, has saved.
        progress: receives the progress of the run; without it nothing is shown.
        part: Run share I of N: part="2/8"; auto takes the one that the launcher's variables name.
        claim: Work as one of any number of workers on any machines: take what no other has taken, or left when it died.
        force: Replace an existing checkpoint at OUT in one step, and nothing else that is stored there.
        resume: Continue where an interrupted run stopped (the default).
        fsync: Wait until the disk has all bytes before the output appears (the default).
        dry_run: Show the plan and write nothing.
        memory: Bound working memory: memory="256MiB". Default 1GiB.
        threads: Use N threads to move bytes: threads=8.
        verify: Check the output after writing. Default quick.
        ray: Run the plan on a Ray cluster: ray="auto".
        emit: Write the job file that runs the plan on many nodes, and nothing else: emit=("slurm", "job.sh").
        sign: Sign the output with this private key (PEM, ECDSA), as OpenSSF model signing does: sign="key.pem".
        attest: Write what was made from what, by which command (in-toto, SLSA provenance): attest="out.json". Signed
            too with sign.
        device: Choose where bytes are ordered, cast and hashed. Default cpu.
        pinned: Set aside this much pinned memory for device="cuda": pinned="1GiB". Default: what the run needs.

    Returns:
        As `ckpt.convert`; `committed` says whether the output is in its place now, `part` and `parts` how it is shared.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
        OutputExists: the output exists, another run is writing it, or it is in the source.
        SourceChanged: a source changed during the run.
    """

def audit(
    path: StrPath,
    *,
    progress: Progress = SILENT,
    values: bool = False,
    sarif: str | PathLike[str] | None = None,
    junit: str | PathLike[str] | None = None,
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
) -> AuditResult:
    r"""Check that a checkpoint is complete and plausible for its own config.

    Args:
        path: a file, a folder or a URL.
        progress: receives the progress of the run; without it nothing is shown.
        values: Read the values too: copies, zeros, constants, NaN, order of fused parts.
        sarif: Save the findings as SARIF 2.1.0: sarif="audit.sarif".
        junit: Save the findings as JUnit XML: junit="audit.xml".
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.

    Returns:
        `ok`, `family`, `findings`, worst first.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
    """

def convert(
    src: StrPath,
    dst: StrPath,
    *,
    progress: Progress = SILENT,
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
    to: str | None = None,
    tp: int | str | None = None,
    pp: int | str | None = None,
    ep: int | str | None = None,
    etp: int | str | None = None,
    dp: int | str | None = None,
    cp: int | str | None = None,
    vpp: int | str | None = None,
    pp_split: str | Iterable[int] | None = None,
    zero: int | str | None = None,
    layout: str | PathLike[str] | None = None,
    on_indivisible: str | None = None,
    strict_shard: bool = False,
    dialect: str | None = None,
    experts: str | None = None,
    aoa: str | PathLike[str] | None = None,
    state: str | Iterable[str] | None = None,
    drop: str | Iterable[str] | None = None,
    as_model: str | None = None,
    dtype: str | Iterable[str] | Mapping[str, str] | None = None,
    dequantize: bool = False,
    quantize: str | None = None,
    quantize_skip: str | Iterable[str] | None = None,
    quantize_only: str | Iterable[str] | None = None,
    repack: str | None = None,
    vocab_size: int | str | None = None,
    tied_head: str | None = None,
    allow_lossy: bool = False,
    remove_keys: str | Iterable[str] | None = None,
    keep_keys: str | Iterable[str] | None = None,
    rename: str | Iterable[str] | None = None,
    model_only: bool = False,
    force: bool = False,
    resume: bool | None = True,
    fsync: bool | None = True,
    dry_run: bool = False,
    memory: int | str | None = 1073741824,
    threads: int | str | None = None,
    verify: str | None = "quick",
    ray: str | PathLike[str] | None = None,
    emit: tuple[str, str] | None = None,
    sign: str | PathLike[str] | None = None,
    attest: str | PathLike[str] | None = None,
    device: str | None = "cpu",
    pinned: int | str | tuple[int, int] | None = None,
    max_shard_size: int | str | None = None,
    plan: str | PathLike[str] | None = None,
    gguf_type: str | None = None,
    gguf_only: str | Iterable[str] | None = None,
    spec: str | None = None,
    hybrid_layer_pattern: str | PathLike[str] | None = None,
    sharding: str | None = None,
) -> WriteResult:
    r"""Convert a checkpoint to another format, other names and other parallel degrees, in one step.

        ckpt.convert("runs/7", "out", to="safetensors", dtype="bf16")

    Args:
        src: the checkpoint: a file, a folder or a URL.
        dst: the output: a new file or folder, or a place in a store.
        progress: receives the progress of the run; without it nothing is shown.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.
        to: Write this format: safetensors, torch, dcp, sharded, megatron, megatron-dist, megatron-fsdp, deepspeed,
            deepspeed-universal, paddle, paddle-unified, paddle-flex, meta, peft, gguf, orbax.
        tp: Write for N tensor parallel ranks: tp=8.
        pp: Write for N pipeline stages: pp=4.
        ep: Write for N expert parallel ranks: ep=8.
        etp: Cut experts for N tensor parallel ranks: etp=1.
        dp: Write for N data parallel ranks: dp=4.
        cp: Write for N context parallel ranks: cp=2.
        vpp: Give each rank N virtual pipeline stages: vpp=2.
        pp_split: Set the layers of each pipeline stage: 8,9,9,6; auto makes stages of about equal bytes.
        zero: Set the ZeRO stage, which says what data parallel ranks shard: zero=1.
        layout: Read the mesh and placement rules from a TOML file: layout="mesh.toml".
        on_indivisible: Choose what happens where a dim does not divide: largest-dim, prefix, best-subset, dtensor, pad,
            replicate, error. Default largest-dim; for data ranks dtensor.
        strict_shard: Refuse dims that do not divide: the same as on_indivisible="error".
        dialect: Write the names and structure of this system: hf, megatron, paddle, meta, gguf, torchtune, olmo-core,
            maxtext, gemma, megatron-swift, maxtext-unscanned, torchtune-0.6, keep. Default: that of the format.
        experts: Write experts one by one (split) or stacked in one tensor (fused), under Hugging Face's names. Default:
            as in the source, or as released.
        aoa: Map names and structure by Paddle's any-to-any (AOA) statements: aoa="rules.txt".
        state: Take only these states: model, master, optimizer, ema, extras, or all.
        drop: Leave this state out: model, master, optimizer, ema or extras. drop="optimizer" strips a training
            checkpoint. A list gives several.
        as_model: Write this state as the model: as_model="ema". ema,model takes weights that have no average from the
            model.
        dtype: Cast values: dtype="bf16", or one state: dtype="optimizer=bf16". A list gives several.
        dequantize: Write quantised weights and states as floats.
        quantize: Quantise the weights of layers, rounding to nearest: fp8-block, fp8-channel, int8, int4-g128, mxfp8,
            mxfp4, nvfp4, fp8-channel:torchao, int8:torchao.
        quantize_skip: Leave these weights unquantised too: quantize_skip="*.o_proj.*". A list gives several.
        quantize_only: Quantise only these weights: quantize_only="*.experts.*". A list gives several.
        repack: Store the same values of GPTQ or AWQ weights as another library does: compressed-tensors.
        vocab_size: Set the rows of the vocabulary: further rows are cut off, missing ones are zeros. vocab_size=32000.
        tied_head: Write an output layer that equals the embedding once (tie) or twice (untie).
        allow_lossy: Allow casts that overflow or saturate, and count them.
        remove_keys: Leave out tensors with all their states: 'lm_head.*', re:EXPRESSION or @FILE. A list gives several.
        keep_keys: Leave out all tensors but these: 'model.layers.*'. A list gives several.
        rename: Rename tensors with all their states: 'module.*=*', 're:^h\.(\d+)=layers.\1', or @FILE. A list gives
            several.
        model_only: Remove keys from the model alone, and keep their optimizer, master and EMA states.
        force: Replace an existing checkpoint at OUT in one step, and nothing else that is stored there.
        resume: Continue where an interrupted run stopped (the default).
        fsync: Wait until the disk has all bytes before the output appears (the default).
        dry_run: Show the plan and write nothing.
        memory: Bound working memory: memory="256MiB". Default 1GiB.
        threads: Use N threads to move bytes: threads=8.
        verify: Check the output after writing. Default quick.
        ray: Run the plan on a Ray cluster: ray="auto".
        emit: Write the job file that runs the plan on many nodes, and nothing else: emit=("slurm", "job.sh").
        sign: Sign the output with this private key (PEM, ECDSA), as OpenSSF model signing does: sign="key.pem".
        attest: Write what was made from what, by which command (in-toto, SLSA provenance): attest="out.json". Signed
            too with sign.
        device: Choose where bytes are ordered, cast and hashed. Default cpu.
        pinned: Set aside this much pinned memory for device="cuda": pinned="1GiB". Default: what the run needs.
        max_shard_size: Limit the size of each file: max_shard_size="2GB". Default 5GB.
        plan: Save the plan for `ckpt.apply`, and write nothing else: plan="plan.json".
        gguf_type: Write matrices in this type: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, tq1_0, tq2_0, mxfp4.
            Default: as in the source.
        gguf_only: Apply gguf_type to these matrices alone: '*ffn_down*'. A list gives several.
        spec: Write layers of Megatron's own modules (local) or of Transformer Engine (te). Default: as in the source,
            or local.
        hybrid_layer_pattern: Write a GPTModel as a HybridModel of these layers: '*-*-'; none converts back.
        sharding: Shard optimizer states by owner (v1) or in slices (v2). Default: as in the source.

    Returns:
        `plan` (bytes, files), `states`, `fallbacks`, `dropped` (what was not written, and why), `notes`.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
        OutputExists: the output exists, another run is writing it, or it is in the source.
        SourceChanged: a source changed during the run.
    """

def delta(
    src: StrPath,
    new: StrPath,
    dst: StrPath,
    *,
    progress: Progress = SILENT,
    encoding: str | None = "xor",
    checksum: str | None = "xxh3-128",
    weight_version: int | str | None = None,
    dedup: bool = False,
    force: bool = False,
    fsync: bool | None = True,
    dry_run: bool = False,
    threads: int | str | None = None,
    max_shard_size: int | str | None = 5000000000,
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
) -> DeltaResult:
    r"""Write what changed between two checkpoints, in the form that slime and SGLang use.

    Args:
        src: the base: the checkpoint as it was.
        new: the checkpoint as it is, in any format and layout.
        dst: the output: a new folder.
        progress: receives the progress of the run; without it nothing is shown.
        encoding: Encode changes as xor (smallest) or overwrite (may be applied twice). Default xor.
        checksum: Store this digest of each tensor. Default xxh3-128.
        weight_version: Number the version that NEW is: weight_version=2. Default: as the folders are called
            (weight_v000002), or 1.
        dedup: Keep every file of NEW, a step of BASE's run, byte for byte, optimizer and extras included.
        force: Replace an existing checkpoint at OUT in one step, and nothing else that is stored there.
        fsync: Wait until the disk has all bytes before the output appears (the default).
        dry_run: Show what would be compared, and write nothing.
        threads: Use N threads to compare and compress: threads=8.
        max_shard_size: Limit the size of each file: max_shard_size="2GB". Default 5GB.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.

    Returns:
        `delta` (version, tensors, changed bytes), `plan`, `notes`.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
        OutputExists: the output exists, another run is writing it, or it is in the source.
        SourceChanged: a source changed during the run.
    """

def diff(
    a: StrPath,
    b: StrPath,
    *,
    progress: Progress = SILENT,
    rtol: float | str | None = 0.0,
    atol: float | str | None = 0.0,
    map: str | PathLike[str] | None = None,
    rename: str | Iterable[str] | None = None,
    dialect: str | None = None,
    state: str | Iterable[str] | None = None,
    rank: bool = False,
    device: str | None = "cpu",
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
) -> DiffResult:
    r"""Compare the values of two checkpoints, in whatever formats and layouts they are.

    A difference is a result and raises nothing.

    Args:
        a: a checkpoint.
        b: another.
        progress: receives the progress of the run; without it nothing is shown.
        rtol: Allow this relative difference: rtol=1e-3. Default 0: bit for bit.
        atol: Allow this absolute difference: atol=1e-6. Default 0.
        map: Rename tensors of A by a file of pairs of names before comparing: map="names.json".
        rename: Rename tensors of A before comparing: 'module.*=*', 're:EXPRESSION=REPLACEMENT', or @FILE. A list gives
            several.
        dialect: Compare both under the names of this system: hf, megatron, paddle, meta, gguf, torchtune, olmo-core,
            maxtext, gemma, megatron-swift, maxtext-unscanned, torchtune-0.6, keep. Default keep.
        state: Compare only this state: state="model". A list gives several.
        rank: Name the files and ranks that hold the values which differ.
        device: Choose where bytes are ordered, cast and hashed. Default cpu.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.

    Returns:
        `equal`, `compared`, `differences` (a dict for each tensor that differs), `summary` (by state and module).

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
    """

def inspect(
    path: StrPath,
    *,
    match: str | Iterable[str] | None = None,
    state: str | Iterable[str] | None = None,
    placement: bool = False,
    security: bool = False,
    stats: bool = False,
    anonymous: bool = False,
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
) -> InspectResult:
    r"""Say what is in a checkpoint, from its headers alone. Nothing in it is ever run.

    Args:
        path: a file, a folder or a URL.
        match: List only these tensors: '*.q_proj.*', re:EXPRESSION or @FILE. A list gives several.
        state: List only this state: state="model". A list gives several.
        placement: Show who holds what: chunks, files, ranks.
        security: List every global that a pickle names.
        stats: Read the values too: min, max, mean, std, zeros, NaN, Inf.
        anonymous: Hash the words of names that few models have; leave out paths, values, extras and notes: for a bug
            report.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.

    Returns:
        `format`, `mesh`, `total`, `states`, `tensors` (a dict for each), `extras`, `notes`.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
    """

def latest(
    run: StrPath,
    *,
    progress: Progress = SILENT,
    skip_unreadable: bool = False,
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
) -> LatestResult:
    r"""Find the newest complete step of a training run.

    Args:
        run: the folder, or the URL, in which the run keeps its steps.
        progress: receives the steps that were skipped; without it nothing is shown.
        skip_unreadable: Pass over newer steps that can't be read. Default: an error.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.

    Returns:
        `path` and `step`, None where no step is complete; `passed_over` says which newer ones are not, and why.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
    """

def merge(
    sources: StrPath | Sequence[StrPath],
    dst: StrPath,
    *,
    progress: Progress = SILENT,
    to: str | None = None,
    tp: int | str | None = None,
    pp: int | str | None = None,
    ep: int | str | None = None,
    etp: int | str | None = None,
    dp: int | str | None = None,
    cp: int | str | None = None,
    vpp: int | str | None = None,
    pp_split: str | Iterable[int] | None = None,
    zero: int | str | None = None,
    layout: str | PathLike[str] | None = None,
    on_indivisible: str | None = None,
    strict_shard: bool = False,
    dialect: str | None = None,
    experts: str | None = None,
    aoa: str | PathLike[str] | None = None,
    state: str | Iterable[str] | None = None,
    drop: str | Iterable[str] | None = None,
    as_model: str | None = None,
    dtype: str | Iterable[str] | Mapping[str, str] | None = None,
    dequantize: bool = False,
    quantize: str | None = None,
    quantize_skip: str | Iterable[str] | None = None,
    quantize_only: str | Iterable[str] | None = None,
    repack: str | None = None,
    vocab_size: int | str | None = None,
    tied_head: str | None = None,
    allow_lossy: bool = False,
    remove_keys: str | Iterable[str] | None = None,
    keep_keys: str | Iterable[str] | None = None,
    rename: str | Iterable[str] | None = None,
    model_only: bool = False,
    force: bool = False,
    resume: bool | None = True,
    fsync: bool | None = True,
    dry_run: bool = False,
    memory: int | str | None = 1073741824,
    threads: int | str | None = None,
    verify: str | None = "quick",
    ray: str | PathLike[str] | None = None,
    emit: tuple[str, str] | None = None,
    sign: str | PathLike[str] | None = None,
    attest: str | PathLike[str] | None = None,
    device: str | None = "cpu",
    pinned: int | str | tuple[int, int] | None = None,
    max_shard_size: int | str | None = None,
    plan: str | PathLike[str] | None = None,
    gguf_type: str | None = None,
    gguf_only: str | Iterable[str] | None = None,
    spec: str | None = None,
    hybrid_layer_pattern: str | PathLike[str] | None = None,
    sharding: str | None = None,
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
    method: str | None = None,
    weight: float | str | Iterable[float | str] | None = None,
    base: str | PathLike[str] | None = None,
    density: float | str | Iterable[float | str] | None = None,
    t: float | str | None = None,
    epsilon: float | str | None = None,
    gamma: float | str | None = None,
    lambda_: float | str | None = None,
    normalize: bool | None = None,
    schedule: str | None = None,
    decay: float | str | None = None,
    last: int | str | None = None,
    steps: str | Iterable[str] | None = None,
    seed: int | str | None = None,
    tokenizer: str | None = None,
    on_conflict: str | None = "error",
) -> WriteResult:
    r"""Merge models, fold adapters, average steps, or join the shards of one checkpoint.

        ckpt.merge(["base", "adapter"], "out", method="lora")
        ckpt.merge("runs/7", "out", method="average", last=4)

    Args:
        sources: the checkpoints, in their order. One path is one source. [] where `config` names them.
        dst: the output: a new file or folder, or a place in a store.
        progress: receives the progress of the run; without it nothing is shown.
        to: Write this format: safetensors, torch, dcp, sharded, megatron, megatron-dist, megatron-fsdp, deepspeed,
            deepspeed-universal, paddle, paddle-unified, paddle-flex, meta, peft, gguf, orbax.
        tp: Write for N tensor parallel ranks: tp=8.
        pp: Write for N pipeline stages: pp=4.
        ep: Write for N expert parallel ranks: ep=8.
        etp: Cut experts for N tensor parallel ranks: etp=1.
        dp: Write for N data parallel ranks: dp=4.
        cp: Write for N context parallel ranks: cp=2.
        vpp: Give each rank N virtual pipeline stages: vpp=2.
        pp_split: Set the layers of each pipeline stage: 8,9,9,6; auto makes stages of about equal bytes.
        zero: Set the ZeRO stage, which says what data parallel ranks shard: zero=1.
        layout: Read the mesh and placement rules from a TOML file: layout="mesh.toml".
        on_indivisible: Choose what happens where a dim does not divide: largest-dim, prefix, best-subset, dtensor, pad,
            replicate, error. Default largest-dim; for data ranks dtensor.
        strict_shard: Refuse dims that do not divide: the same as on_indivisible="error".
        dialect: Write the names and structure of this system: hf, megatron, paddle, meta, gguf, torchtune, olmo-core,
            maxtext, gemma, megatron-swift, maxtext-unscanned, torchtune-0.6, keep. Default: that of the format.
        experts: Write experts one by one (split) or stacked in one tensor (fused), under Hugging Face's names. Default:
            as in the source, or as released.
        aoa: Map names and structure by Paddle's any-to-any (AOA) statements: aoa="rules.txt".
        state: Take only these states: model, master, optimizer, ema, extras, or all.
        drop: Leave this state out: model, master, optimizer, ema or extras. drop="optimizer" strips a training
            checkpoint. A list gives several.
        as_model: Write this state as the model: as_model="ema". ema,model takes weights that have no average from the
            model.
        dtype: Cast values: dtype="bf16", or one state: dtype="optimizer=bf16". A list gives several.
        dequantize: Write quantised weights and states as floats.
        quantize: Quantise the weights of layers, rounding to nearest: fp8-block, fp8-channel, int8, int4-g128, mxfp8,
            mxfp4, nvfp4, fp8-channel:torchao, int8:torchao.
        quantize_skip: Leave these weights unquantised too: quantize_skip="*.o_proj.*". A list gives several.
        quantize_only: Quantise only these weights: quantize_only="*.experts.*". A list gives several.
        repack: Store the same values of GPTQ or AWQ weights as another library does: compressed-tensors.
        vocab_size: Set the rows of the vocabulary: further rows are cut off, missing ones are zeros. vocab_size=32000.
        tied_head: Write an output layer that equals the embedding once (tie) or twice (untie).
        allow_lossy: Allow casts that overflow or saturate, and count them.
        remove_keys: Leave out tensors with all their states: 'lm_head.*', re:EXPRESSION or @FILE. A list gives several.
        keep_keys: Leave out all tensors but these: 'model.layers.*'. A list gives several.
        rename: Rename tensors with all their states: 'module.*=*', 're:^h\.(\d+)=layers.\1', or @FILE. A list gives
            several.
        model_only: Remove keys from the model alone, and keep their optimizer, master and EMA states.
        force: Replace an existing checkpoint at OUT in one step, and nothing else that is stored there.
        resume: Continue where an interrupted run stopped (the default).
        fsync: Wait until the disk has all bytes before the output appears (the default).
        dry_run: Show the plan and write nothing.
        memory: Bound working memory: memory="256MiB". Default 1GiB.
        threads: Use N threads to move bytes: threads=8.
        verify: Check the output after writing. Default quick.
        ray: Run the plan on a Ray cluster: ray="auto".
        emit: Write the job file that runs the plan on many nodes, and nothing else: emit=("slurm", "job.sh").
        sign: Sign the output with this private key (PEM, ECDSA), as OpenSSF model signing does: sign="key.pem".
        attest: Write what was made from what, by which command (in-toto, SLSA provenance): attest="out.json". Signed
            too with sign.
        device: Choose where bytes are ordered, cast and hashed. Default cpu.
        pinned: Set aside this much pinned memory for device="cuda": pinned="1GiB". Default: what the run needs.
        max_shard_size: Limit the size of each file: max_shard_size="2GB". Default 5GB.
        plan: Save the plan for `ckpt.apply`, and write nothing else: plan="plan.json".
        gguf_type: Write matrices in this type: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, tq1_0, tq2_0, mxfp4.
            Default: as in the source.
        gguf_only: Apply gguf_type to these matrices alone: '*ffn_down*'. A list gives several.
        spec: Write layers of Megatron's own modules (local) or of Transformer Engine (te). Default: as in the source,
            or local.
        hybrid_layer_pattern: Write a GPTModel as a HybridModel of these layers: '*-*-'; none converts back.
        sharding: Shard optimizer states by owner (v1) or in slices (v2). Default: as in the source.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Read a mergekit config, which names the sources; only OUT is given then: config="merge.yaml".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.
        method: Merge by this method: union, lora, linear, slerp, nuslerp, task-arithmetic, ties, dare-linear,
            dare-ties, della, della-linear, breadcrumbs, breadcrumbs-ties, model-stock, passthrough, average, ema.
            Default union.
        weight: Weight a source, in their order: weight=[0.7, 0.3]. A list gives several.
        base: Name the model that the sources were trained from: base="llama".
        density: Keep this share of a task vector (ties, dare, della, breadcrumbs): density=0.5. A list gives several.
        t: Interpolate to this point with slerp, 0 to 1: t=0.3.
        epsilon: Vary della's share by rank by this much: epsilon=0.1. Default 0.15.
        gamma: Leave out this share of the largest values with breadcrumbs: gamma=0.02. Default 0.01.
        lambda_: Multiply the merged task vector: lambda_=0.8. Default 1.
        normalize: Divide by the sum of the weights, or don't. Default: as the method does.
        schedule: Weight steps by age with method="average": uniform, linear, cosine, minus-sqrt, ema. Default uniform.
        decay: Keep this share of the average at each step (ema): decay=0.9.
        last: Merge the last N checkpoints of the folder SRC: last=4.
        steps: Merge these steps of the folder SRC: steps="100,200,300".
        seed: Seed the random choices of dare and della: seed=7. Default 0.
        tokenizer: Merge though tokenizers differ, and keep the base's.
        on_conflict: Choose what happens where sources have one tensor with different values. Default error.

    Returns:
        `plan` (bytes, files), `states`, `removed`, `dropped` (what was not written, and why), `notes`.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
        OutputExists: the output exists, another run is writing it, or it is in the source.
        SourceChanged: a source changed during the run.
    """

def patch(
    src: StrPath,
    deltas: StrPath | Sequence[StrPath],
    dst: StrPath,
    *,
    progress: Progress = SILENT,
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
    to: str | None = None,
    tp: int | str | None = None,
    pp: int | str | None = None,
    ep: int | str | None = None,
    etp: int | str | None = None,
    dp: int | str | None = None,
    cp: int | str | None = None,
    vpp: int | str | None = None,
    pp_split: str | Iterable[int] | None = None,
    zero: int | str | None = None,
    layout: str | PathLike[str] | None = None,
    on_indivisible: str | None = None,
    strict_shard: bool = False,
    dialect: str | None = None,
    experts: str | None = None,
    aoa: str | PathLike[str] | None = None,
    state: str | Iterable[str] | None = None,
    drop: str | Iterable[str] | None = None,
    as_model: str | None = None,
    dtype: str | Iterable[str] | Mapping[str, str] | None = None,
    dequantize: bool = False,
    quantize: str | None = None,
    quantize_skip: str | Iterable[str] | None = None,
    quantize_only: str | Iterable[str] | None = None,
    repack: str | None = None,
    vocab_size: int | str | None = None,
    tied_head: str | None = None,
    allow_lossy: bool = False,
    remove_keys: str | Iterable[str] | None = None,
    keep_keys: str | Iterable[str] | None = None,
    rename: str | Iterable[str] | None = None,
    model_only: bool = False,
    force: bool = False,
    resume: bool | None = True,
    fsync: bool | None = True,
    dry_run: bool = False,
    memory: int | str | None = 1073741824,
    threads: int | str | None = None,
    verify: str | None = "quick",
    ray: str | PathLike[str] | None = None,
    emit: tuple[str, str] | None = None,
    sign: str | PathLike[str] | None = None,
    attest: str | PathLike[str] | None = None,
    device: str | None = "cpu",
    pinned: int | str | tuple[int, int] | None = None,
    max_shard_size: int | str | None = None,
    plan: str | PathLike[str] | None = None,
    gguf_type: str | None = None,
    gguf_only: str | Iterable[str] | None = None,
    spec: str | None = None,
    hybrid_layer_pattern: str | PathLike[str] | None = None,
    sharding: str | None = None,
) -> WriteResult:
    r"""Write a base with a chain of deltas applied.

    Args:
        src: the base.
        deltas: what `ckpt.delta` wrote, in their order. One path is one delta.
        dst: the output: a new file or folder, or a place in a store.
        progress: receives the progress of the run; without it nothing is shown.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.
        to: Write this format: safetensors, torch, dcp, sharded, megatron, megatron-dist, megatron-fsdp, deepspeed,
            deepspeed-universal, paddle, paddle-unified, paddle-flex, meta, peft, gguf, orbax.
        tp: Write for N tensor parallel ranks: tp=8.
        pp: Write for N pipeline stages: pp=4.
        ep: Write for N expert parallel ranks: ep=8.
        etp: Cut experts for N tensor parallel ranks: etp=1.
        dp: Write for N data parallel ranks: dp=4.
        cp: Write for N context parallel ranks: cp=2.
        vpp: Give each rank N virtual pipeline stages: vpp=2.
        pp_split: Set the layers of each pipeline stage: 8,9,9,6; auto makes stages of about equal bytes.
        zero: Set the ZeRO stage, which says what data parallel ranks shard: zero=1.
        layout: Read the mesh and placement rules from a TOML file: layout="mesh.toml".
        on_indivisible: Choose what happens where a dim does not divide: largest-dim, prefix, best-subset, dtensor, pad,
            replicate, error. Default largest-dim; for data ranks dtensor.
        strict_shard: Refuse dims that do not divide: the same as on_indivisible="error".
        dialect: Write the names and structure of this system: hf, megatron, paddle, meta, gguf, torchtune, olmo-core,
            maxtext, gemma, megatron-swift, maxtext-unscanned, torchtune-0.6, keep. Default: that of the format.
        experts: Write experts one by one (split) or stacked in one tensor (fused), under Hugging Face's names. Default:
            as in the source, or as released.
        aoa: Map names and structure by Paddle's any-to-any (AOA) statements: aoa="rules.txt".
        state: Take only these states: model, master, optimizer, ema, extras, or all.
        drop: Leave this state out: model, master, optimizer, ema or extras. drop="optimizer" strips a training
            checkpoint. A list gives several.
        as_model: Write this state as the model: as_model="ema". ema,model takes weights that have no average from the
            model.
        dtype: Cast values: dtype="bf16", or one state: dtype="optimizer=bf16". A list gives several.
        dequantize: Write quantised weights and states as floats.
        quantize: Quantise the weights of layers, rounding to nearest: fp8-block, fp8-channel, int8, int4-g128, mxfp8,
            mxfp4, nvfp4, fp8-channel:torchao, int8:torchao.
        quantize_skip: Leave these weights unquantised too: quantize_skip="*.o_proj.*". A list gives several.
        quantize_only: Quantise only these weights: quantize_only="*.experts.*". A list gives several.
        repack: Store the same values of GPTQ or AWQ weights as another library does: compressed-tensors.
        vocab_size: Set the rows of the vocabulary: further rows are cut off, missing ones are zeros. vocab_size=32000.
        tied_head: Write an output layer that equals the embedding once (tie) or twice (untie).
        allow_lossy: Allow casts that overflow or saturate, and count them.
        remove_keys: Leave out tensors with all their states: 'lm_head.*', re:EXPRESSION or @FILE. A list gives several.
        keep_keys: Leave out all tensors but these: 'model.layers.*'. A list gives several.
        rename: Rename tensors with all their states: 'module.*=*', 're:^h\.(\d+)=layers.\1', or @FILE. A list gives
            several.
        model_only: Remove keys from the model alone, and keep their optimizer, master and EMA states.
        force: Replace an existing checkpoint at OUT in one step, and nothing else that is stored there.
        resume: Continue where an interrupted run stopped (the default).
        fsync: Wait until the disk has all bytes before the output appears (the default).
        dry_run: Show the plan and write nothing.
        memory: Bound working memory: memory="256MiB". Default 1GiB.
        threads: Use N threads to move bytes: threads=8.
        verify: Check the output after writing. Default quick.
        ray: Run the plan on a Ray cluster: ray="auto".
        emit: Write the job file that runs the plan on many nodes, and nothing else: emit=("slurm", "job.sh").
        sign: Sign the output with this private key (PEM, ECDSA), as OpenSSF model signing does: sign="key.pem".
        attest: Write what was made from what, by which command (in-toto, SLSA provenance): attest="out.json". Signed
            too with sign.
        device: Choose where bytes are ordered, cast and hashed. Default cpu.
        pinned: Set aside this much pinned memory for device="cuda": pinned="1GiB". Default: what the run needs.
        max_shard_size: Limit the size of each file: max_shard_size="2GB". Default 5GB.
        plan: Save the plan for `ckpt.apply`, and write nothing else: plan="plan.json".
        gguf_type: Write matrices in this type: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, tq1_0, tq2_0, mxfp4.
            Default: as in the source.
        gguf_only: Apply gguf_type to these matrices alone: '*ffn_down*'. A list gives several.
        spec: Write layers of Megatron's own modules (local) or of Transformer Engine (te). Default: as in the source,
            or local.
        hybrid_layer_pattern: Write a GPTModel as a HybridModel of these layers: '*-*-'; none converts back.
        sharding: Shard optimizer states by owner (v1) or in slices (v2). Default: as in the source.

    Returns:
        As `ckpt.convert`.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
        OutputExists: the output exists, another run is writing it, or it is in the source.
        SourceChanged: a source changed during the run.
    """

def plan(
    src: StrPath,
    dst: StrPath,
    file: StrPath | None = None,
    *,
    progress: Progress = SILENT,
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
    to: str | None = None,
    tp: int | str | None = None,
    pp: int | str | None = None,
    ep: int | str | None = None,
    etp: int | str | None = None,
    dp: int | str | None = None,
    cp: int | str | None = None,
    vpp: int | str | None = None,
    pp_split: str | Iterable[int] | None = None,
    zero: int | str | None = None,
    layout: str | PathLike[str] | None = None,
    on_indivisible: str | None = None,
    strict_shard: bool = False,
    dialect: str | None = None,
    experts: str | None = None,
    aoa: str | PathLike[str] | None = None,
    state: str | Iterable[str] | None = None,
    drop: str | Iterable[str] | None = None,
    as_model: str | None = None,
    dtype: str | Iterable[str] | Mapping[str, str] | None = None,
    dequantize: bool = False,
    quantize: str | None = None,
    quantize_skip: str | Iterable[str] | None = None,
    quantize_only: str | Iterable[str] | None = None,
    repack: str | None = None,
    vocab_size: int | str | None = None,
    tied_head: str | None = None,
    allow_lossy: bool = False,
    remove_keys: str | Iterable[str] | None = None,
    keep_keys: str | Iterable[str] | None = None,
    rename: str | Iterable[str] | None = None,
    model_only: bool = False,
    force: bool = False,
    resume: bool | None = True,
    fsync: bool | None = True,
    memory: int | str | None = 1073741824,
    threads: int | str | None = None,
    verify: str | None = "quick",
    ray: str | PathLike[str] | None = None,
    emit: tuple[str, str] | None = None,
    sign: str | PathLike[str] | None = None,
    attest: str | PathLike[str] | None = None,
    device: str | None = "cpu",
    pinned: int | str | tuple[int, int] | None = None,
    max_shard_size: int | str | None = None,
    gguf_type: str | None = None,
    gguf_only: str | Iterable[str] | None = None,
    spec: str | None = None,
    hybrid_layer_pattern: str | PathLike[str] | None = None,
    sharding: str | None = None,
) -> WriteResult:
    r"""Plan a conversion, or without `to` a reshard, and write no checkpoint.

        ckpt.plan("runs/7", "out", "plan.json", to="dcp", dp=8)
        ckpt.apply("plan.json")

    A merge is planned by `ckpt.merge(..., dry_run=True)` or `ckpt.merge(..., plan="plan.json")`.

    Args:
        src: the checkpoint: a file, a folder or a URL.
        dst: what will be written. It may exist with `force=True`.
        file: where the plan is saved for `ckpt.apply`; None saves nothing.
        progress: shown the plan; silent where none is given.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.
        to: Write this format: safetensors, torch, dcp, sharded, megatron, megatron-dist, megatron-fsdp, deepspeed,
            deepspeed-universal, paddle, paddle-unified, paddle-flex, meta, peft, gguf, orbax.
        tp: Write for N tensor parallel ranks: tp=8.
        pp: Write for N pipeline stages: pp=4.
        ep: Write for N expert parallel ranks: ep=8.
        etp: Cut experts for N tensor parallel ranks: etp=1.
        dp: Write for N data parallel ranks: dp=4.
        cp: Write for N context parallel ranks: cp=2.
        vpp: Give each rank N virtual pipeline stages: vpp=2.
        pp_split: Set the layers of each pipeline stage: 8,9,9,6; auto makes stages of about equal bytes.
        zero: Set the ZeRO stage, which says what data parallel ranks shard: zero=1.
        layout: Read the mesh and placement rules from a TOML file: layout="mesh.toml".
        on_indivisible: Choose what happens where a dim does not divide: largest-dim, prefix, best-subset, dtensor, pad,
            replicate, error. Default largest-dim; for data ranks dtensor.
        strict_shard: Refuse dims that do not divide: the same as on_indivisible="error".
        dialect: Write the names and structure of this system: hf, megatron, paddle, meta, gguf, torchtune, olmo-core,
            maxtext, gemma, megatron-swift, maxtext-unscanned, torchtune-0.6, keep. Default: that of the format.
        experts: Write experts one by one (split) or stacked in one tensor (fused), under Hugging Face's names. Default:
            as in the source, or as released.
        aoa: Map names and structure by Paddle's any-to-any (AOA) statements: aoa="rules.txt".
        state: Take only these states: model, master, optimizer, ema, extras, or all.
        drop: Leave this state out: model, master, optimizer, ema or extras. drop="optimizer" strips a training
            checkpoint. A list gives several.
        as_model: Write this state as the model: as_model="ema". ema,model takes weights that have no average from the
            model.
        dtype: Cast values: dtype="bf16", or one state: dtype="optimizer=bf16". A list gives several.
        dequantize: Write quantised weights and states as floats.
        quantize: Quantise the weights of layers, rounding to nearest: fp8-block, fp8-channel, int8, int4-g128, mxfp8,
            mxfp4, nvfp4, fp8-channel:torchao, int8:torchao.
        quantize_skip: Leave these weights unquantised too: quantize_skip="*.o_proj.*". A list gives several.
        quantize_only: Quantise only these weights: quantize_only="*.experts.*". A list gives several.
        repack: Store the same values of GPTQ or AWQ weights as another library does: compressed-tensors.
        vocab_size: Set the rows of the vocabulary: further rows are cut off, missing ones are zeros. vocab_size=32000.
        tied_head: Write an output layer that equals the embedding once (tie) or twice (untie).
        allow_lossy: Allow casts that overflow or saturate, and count them.
        remove_keys: Leave out tensors with all their states: 'lm_head.*', re:EXPRESSION or @FILE. A list gives several.
        keep_keys: Leave out all tensors but these: 'model.layers.*'. A list gives several.
        rename: Rename tensors with all their states: 'module.*=*', 're:^h\.(\d+)=layers.\1', or @FILE. A list gives
            several.
        model_only: Remove keys from the model alone, and keep their optimizer, master and EMA states.
        force: Replace an existing checkpoint at OUT in one step, and nothing else that is stored there.
        resume: Continue where an interrupted run stopped (the default).
        fsync: Wait until the disk has all bytes before the output appears (the default).
        memory: Bound working memory: memory="256MiB". Default 1GiB.
        threads: Use N threads to move bytes: threads=8.
        verify: Check the output after writing. Default quick.
        ray: Run the plan on a Ray cluster: ray="auto".
        emit: Write the job file that runs the plan on many nodes, and nothing else: emit=("slurm", "job.sh").
        sign: Sign the output with this private key (PEM, ECDSA), as OpenSSF model signing does: sign="key.pem".
        attest: Write what was made from what, by which command (in-toto, SLSA provenance): attest="out.json". Signed
            too with sign.
        device: Choose where bytes are ordered, cast and hashed. Default cpu.
        pinned: Set aside this much pinned memory for device="cuda": pinned="1GiB". Default: what the run needs.
        max_shard_size: Limit the size of each file: max_shard_size="2GB". Default 5GB.
        gguf_type: Write matrices in this type: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, tq1_0, tq2_0, mxfp4.
            Default: as in the source.
        gguf_only: Apply gguf_type to these matrices alone: '*ffn_down*'. A list gives several.
        spec: Write layers of Megatron's own modules (local) or of Transformer Engine (te). Default: as in the source,
            or local.
        hybrid_layer_pattern: Write a GPTModel as a HybridModel of these layers: '*-*-'; none converts back.
        sharding: Shard optimizer states by owner (v1) or in slices (v2). Default: as in the source.

    Returns:
        What the run would return, without `elapsed_s` and `digest_checked`; `plan_file` where one was saved.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
        OutputExists: the output exists, another run is writing it, or it is in the source.
        SourceChanged: a source changed during the run.
    """

def prune(
    run: StrPath,
    *,
    progress: Progress = SILENT,
    keep_last: int | str | None = None,
    keep_every: int | str | None = None,
    skip_unreadable: bool = False,
    with_other_files: bool = False,
    deltas: str | Iterable[str] | None = None,
    dry_run: bool = False,
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
) -> PruneResult:
    r"""Remove the steps of a run that no rule keeps, never the last complete one.

        ckpt.prune("runs/7", keep_last=3, dry_run=True)["remove"]

    Args:
        run: the folder in which the run keeps its steps.
        progress: receives the progress of the run; without it nothing is shown.
        keep_last: Keep the last N complete steps: keep_last=3.
        keep_every: Keep steps whose number is a multiple of K: keep_every=1000.
        skip_unreadable: Leave alone what can't be read, and remove others all the same. Default: remove nothing then.
        with_other_files: Remove steps with all that is in them. Default: a step stays where it holds files that no
            trainer writes.
        deltas: Look here too for deltas that are made on steps of RUN: deltas="/archive/run7". A list gives several.
        dry_run: Show what would be removed, and remove nothing.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.

    Returns:
        `keep` (each with its reasons), `remove`, `freed_bytes`.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
    """

def reshard(
    src: StrPath,
    dst: StrPath,
    *,
    progress: Progress = SILENT,
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
    to: str | None = None,
    tp: int | str | None = None,
    pp: int | str | None = None,
    ep: int | str | None = None,
    etp: int | str | None = None,
    dp: int | str | None = None,
    cp: int | str | None = None,
    vpp: int | str | None = None,
    pp_split: str | Iterable[int] | None = None,
    zero: int | str | None = None,
    layout: str | PathLike[str] | None = None,
    on_indivisible: str | None = None,
    strict_shard: bool = False,
    dialect: str | None = None,
    experts: str | None = None,
    aoa: str | PathLike[str] | None = None,
    state: str | Iterable[str] | None = None,
    drop: str | Iterable[str] | None = None,
    as_model: str | None = None,
    dtype: str | Iterable[str] | Mapping[str, str] | None = None,
    dequantize: bool = False,
    quantize: str | None = None,
    quantize_skip: str | Iterable[str] | None = None,
    quantize_only: str | Iterable[str] | None = None,
    repack: str | None = None,
    vocab_size: int | str | None = None,
    tied_head: str | None = None,
    allow_lossy: bool = False,
    remove_keys: str | Iterable[str] | None = None,
    keep_keys: str | Iterable[str] | None = None,
    rename: str | Iterable[str] | None = None,
    model_only: bool = False,
    force: bool = False,
    resume: bool | None = True,
    fsync: bool | None = True,
    dry_run: bool = False,
    memory: int | str | None = 1073741824,
    threads: int | str | None = None,
    verify: str | None = "quick",
    ray: str | PathLike[str] | None = None,
    emit: tuple[str, str] | None = None,
    sign: str | PathLike[str] | None = None,
    attest: str | PathLike[str] | None = None,
    device: str | None = "cpu",
    pinned: int | str | tuple[int, int] | None = None,
    max_shard_size: int | str | None = None,
    plan: str | PathLike[str] | None = None,
    gguf_type: str | None = None,
    gguf_only: str | Iterable[str] | None = None,
    spec: str | None = None,
    hybrid_layer_pattern: str | PathLike[str] | None = None,
    sharding: str | None = None,
) -> WriteResult:
    r"""Write the same checkpoint for other parallel degrees, with every state of it.

        ckpt.reshard("runs/7", "out", tp=4, pp=2)

    Args:
        src: the checkpoint: a file, a folder or a URL.
        dst: the output: a new file or folder, or a place in a store.
        progress: receives the progress of the run; without it nothing is shown.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.
        to: Write this format: safetensors, torch, dcp, sharded, megatron, megatron-dist, megatron-fsdp, deepspeed,
            deepspeed-universal, paddle, paddle-unified, paddle-flex, meta, peft, gguf, orbax.
        tp: Write for N tensor parallel ranks: tp=8.
        pp: Write for N pipeline stages: pp=4.
        ep: Write for N expert parallel ranks: ep=8.
        etp: Cut experts for N tensor parallel ranks: etp=1.
        dp: Write for N data parallel ranks: dp=4.
        cp: Write for N context parallel ranks: cp=2.
        vpp: Give each rank N virtual pipeline stages: vpp=2.
        pp_split: Set the layers of each pipeline stage: 8,9,9,6; auto makes stages of about equal bytes.
        zero: Set the ZeRO stage, which says what data parallel ranks shard: zero=1.
        layout: Read the mesh and placement rules from a TOML file: layout="mesh.toml".
        on_indivisible: Choose what happens where a dim does not divide: largest-dim, prefix, best-subset, dtensor, pad,
            replicate, error. Default largest-dim; for data ranks dtensor.
        strict_shard: Refuse dims that do not divide: the same as on_indivisible="error".
        dialect: Write the names and structure of this system: hf, megatron, paddle, meta, gguf, torchtune, olmo-core,
            maxtext, gemma, megatron-swift, maxtext-unscanned, torchtune-0.6, keep. Default: that of the format.
        experts: Write experts one by one (split) or stacked in one tensor (fused), under Hugging Face's names. Default:
            as in the source, or as released.
        aoa: Map names and structure by Paddle's any-to-any (AOA) statements: aoa="rules.txt".
        state: Take only these states: model, master, optimizer, ema, extras, or all.
        drop: Leave this state out: model, master, optimizer, ema or extras. drop="optimizer" strips a training
            checkpoint. A list gives several.
        as_model: Write this state as the model: as_model="ema". ema,model takes weights that have no average from the
            model.
        dtype: Cast values: dtype="bf16", or one state: dtype="optimizer=bf16". A list gives several.
        dequantize: Write quantised weights and states as floats.
        quantize: Quantise the weights of layers, rounding to nearest: fp8-block, fp8-channel, int8, int4-g128, mxfp8,
            mxfp4, nvfp4, fp8-channel:torchao, int8:torchao.
        quantize_skip: Leave these weights unquantised too: quantize_skip="*.o_proj.*". A list gives several.
        quantize_only: Quantise only these weights: quantize_only="*.experts.*". A list gives several.
        repack: Store the same values of GPTQ or AWQ weights as another library does: compressed-tensors.
        vocab_size: Set the rows of the vocabulary: further rows are cut off, missing ones are zeros. vocab_size=32000.
        tied_head: Write an output layer that equals the embedding once (tie) or twice (untie).
        allow_lossy: Allow casts that overflow or saturate, and count them.
        remove_keys: Leave out tensors with all their states: 'lm_head.*', re:EXPRESSION or @FILE. A list gives several.
        keep_keys: Leave out all tensors but these: 'model.layers.*'. A list gives several.
        rename: Rename tensors with all their states: 'module.*=*', 're:^h\.(\d+)=layers.\1', or @FILE. A list gives
            several.
        model_only: Remove keys from the model alone, and keep their optimizer, master and EMA states.
        force: Replace an existing checkpoint at OUT in one step, and nothing else that is stored there.
        resume: Continue where an interrupted run stopped (the default).
        fsync: Wait until the disk has all bytes before the output appears (the default).
        dry_run: Show the plan and write nothing.
        memory: Bound working memory: memory="256MiB". Default 1GiB.
        threads: Use N threads to move bytes: threads=8.
        verify: Check the output after writing. Default quick.
        ray: Run the plan on a Ray cluster: ray="auto".
        emit: Write the job file that runs the plan on many nodes, and nothing else: emit=("slurm", "job.sh").
        sign: Sign the output with this private key (PEM, ECDSA), as OpenSSF model signing does: sign="key.pem".
        attest: Write what was made from what, by which command (in-toto, SLSA provenance): attest="out.json". Signed
            too with sign.
        device: Choose where bytes are ordered, cast and hashed. Default cpu.
        pinned: Set aside this much pinned memory for device="cuda": pinned="1GiB". Default: what the run needs.
        max_shard_size: Limit the size of each file: max_shard_size="2GB". Default 5GB.
        plan: Save the plan for `ckpt.apply`, and write nothing else: plan="plan.json".
        gguf_type: Write matrices in this type: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, tq1_0, tq2_0, mxfp4.
            Default: as in the source.
        gguf_only: Apply gguf_type to these matrices alone: '*ffn_down*'. A list gives several.
        spec: Write layers of Megatron's own modules (local) or of Transformer Engine (te). Default: as in the source,
            or local.
        hybrid_layer_pattern: Write a GPTModel as a HybridModel of these layers: '*-*-'; none converts back.
        sharding: Shard optimizer states by owner (v1) or in slices (v2). Default: as in the source.

    Returns:
        `plan` (bytes, files), `states`, `fallbacks`, `dropped` (what was not written, and why), `notes`.

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
        OutputExists: the output exists, another run is writing it, or it is in the source.
        SourceChanged: a source changed during the run.
    """

def status(
    target: StrPath,
    *,
    progress: Progress = SILENT,
    watch: bool = False,
) -> StatusResult:
    r"""Say how far a run is that writes, here or on other machines.

    Args:
        target: the output that is being written, or a saved plan.
        progress: receives the progress of `watch=True`; without it nothing is shown.
        watch: Watch until it is written, or nothing writes any more.

    Returns:
        `state` ("written" or "growing"), `bytes`, `of_bytes`, `seconds_left`, `parts` (done, running or dead).

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
    """

def verify(
    path: StrPath,
    *,
    progress: Progress = SILENT,
    mode: str | None = "full",
    key: str | PathLike[str] | None = None,
    attest: str | PathLike[str] | None = None,
    device: str | None = "cpu",
    from_format: str | None = None,
    follow_symlinks: bool = False,
    lenient: bool = False,
    require_checksums: bool = False,
    prefer: str | PathLike[str] | None = None,
    replica_policy: str | None = None,
    family: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    lora_alpha: float | str | None = None,
) -> VerifyResult:
    r"""Check that a checkpoint is complete and undamaged.

    What is wrong with it is a result; what keeps it from being opened at all is raised.

    Args:
        path: a file, a folder or a URL.
        progress: receives the progress of the run; without it nothing is shown.
        mode: Check headers and extents (quick), or values and checksums too (full). Default full.
        key: Require a signature by this public key (PEM): key="key.pub".
        attest: Compare it with this attestation too: attest="out.json".
        device: Choose where bytes are ordered, cast and hashed. Default cpu.
        from_format: Read SRC as this format instead of detecting it: from_format="dcp".
        follow_symlinks: Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are
            always followed.
        lenient: Warn instead of refusing where no value depends on it.
        require_checksums: Refuse records that have no checksum.
        prefer: Choose between two sets of files in one folder, by format, index, file next to an index, `files`
            (without their index) or variant: prefer="fp16"; or between two models in one file, by their level:
            prefer="teacher".
        replica_policy: Choose what happens where replicas differ: an error (the default), or the first is taken.
        family: Name the model family where the files don't: family="llama".
        config: Take the model's config.json from this file, or from this folder with its tokenizer: config="hf".
        lora_alpha: Give the alpha of an adapter whose files don't state it: lora_alpha=32.

    Returns:
        `ok`, `findings`, `digests` (state -> tensor -> digest, the same in every format and layout).

    Raises:
        UsageError: an option can't be had, or contradicts another.
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
    """
