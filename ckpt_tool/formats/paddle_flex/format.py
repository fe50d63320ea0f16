"""`paddle-flex`: Paddle's flex checkpoints, as `paddle.distributed.save_state_dict` and PaddleFormers' Trainer write them.

The one idea: every rank writes what it holds into one file, flat and as it is, and one metadata file says which box of which
tensor, or which flat part of which box, lies in which file; so any job can load it by geometry alone.

    checkpoint-100/model_state/0.metadata, 0_0.distcp, 1_0.distcp       tp 2, bf16, sharding v2
      model.layers.0.mlp.up_gate_proj.weight  BF16 (24, 56)      columns 0-27 in 0_0.distcp, 28-55 in 1_0.distcp
    checkpoint-100/master_weight/                  model.layers.0.mlp.up_gate_proj.weight.w_0, F32, flattened ranges
    checkpoint-100/optimizer_state/                ... .moment1_0, .moment2_0, .beta1_pow_acc_0, .beta2_pow_acc_0
    checkpoint-100/scheduler.pdparams, saved_signal_0, saved_signal_1

Specification (paddlepaddle 3.3.1 `distributed/flex_checkpoint/dcp/`, PaddleFormers 1.2.0 `trainer/`; checked against runs):

* Folders and files (`paddle_flex.folders`): the Trainer's three, which its loader wants even when one is empty, `ema_state`
  beside them; or one plain folder. Metadata (`paddle_flex.metadata`): a pickle, read as data. Data: `paddle.save` of a flat
  dict with a name table (`paddle.file`), bf16 as uint16 bits; or safetensors. A rank with nothing writes 47 bytes.
* A shard is a block at an offset, whole, or a range of the block's row-major line (sharding v2, without its padding). Blocks
  may be uneven (10 over 4: 3, 3, 3, 1) or empty. What several ranks hold is stored once, by the file with the least keys;
  with `replicate_saved_into_local` by all, and then it is compared.
* Fused `[gate | up]` weights of a TP job are recorded rank after rank, and nothing marks them (`paddle_flex.read`): here the
  logical tensor is the plain `[gate | up]` at every degree. In a plain folder, whose job may as well be an auto-parallel one,
  geometry is taken as it is recorded, with a note; one that is called as the Trainer's folders is one of them.
* Keys (`paddle_flex.keys`): structured names of one card; a tied weight's states lie once, under the first name in the
  alphabet. EMA without metadata: `paddle_flex.ema`. Degrees are what boxes show (`paddle_flex.mesh`).
* `scheduler.pdparams`, `scaler.pdparams`: plain values. `training_args.bin`, `trainer_state.*`, `rng_state*.pth` belong to the
  job: pickles of classes are never opened, none is copied.

Writing: `paddle_flex.target`. Cost: some 15 us a shard. What it does not do: load by AOA statements (`--aoa` maps names).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import Catalog, Note, mark_replicas
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.layout import Layout
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import Target, Wanted
from ckpt_tool.core.tensor import EMA, EXTRAS, MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, UnknownFormat
from ckpt_tool.formats import checksums
from ckpt_tool.formats.base import Evidence, Fitted, Holds
from ckpt_tool.formats.hf import files as hf_files
from ckpt_tool.formats.paddle.extras import read_extras
from ckpt_tool.formats.paddle.file import chunks_of
from ckpt_tool.formats.paddle.rules import side_by_side
from ckpt_tool.formats.paddle_flex import folders as paddle_flex_folders
from ckpt_tool.formats.paddle_flex.ema import old_ema
from ckpt_tool.formats.paddle_flex.folders import EMA_FOLDER, MODEL_FOLDER, Save
from ckpt_tool.formats.paddle_flex.keys import plain_keys, trainer_key
from ckpt_tool.formats.paddle_flex.mesh import degrees_of
from ckpt_tool.formats.paddle_flex.metadata import DTYPE_NAMES, Listing, read_metadata
from ckpt_tool.formats.paddle_flex.names import META, statics
from ckpt_tool.formats.paddle_flex.read import DataFiles, check_files, chunks_of_entry, fused_blocks
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.strict_json import parse

TWICE = "E1339"
CONFIG_LIMIT = 16 << 20  # bytes
_JOB = re.compile(r"training_args\.bin|trainer_state\.(bin|json)|rng_state(_\d+)?\.pth|static_name_to_dyg_name\.json")
_ALL = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64", "C64", "C128", "F8_E4M3",
        "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")  # fmt: skip


class _Flex:
    """The format. See the module."""

    name = "paddle-flex"
    holds = Holds(
        all_states=True, extras=True, mesh=("tp", "pp", "ep", "dp"), zero=1, dialect="paddle", own_layout=True,
        heeds=frozenset({"zero", "sharding", "pp-split"}), dtypes=frozenset(_ALL) - frozenset(DTYPE_NAMES.values()),
    )  # fmt: skip

    def detect(self, tree: Tree) -> Evidence | None:
        """By names: see `formats.paddle_flex.folders`."""
        if tree.single is not None:
            return None
        saves = paddle_flex_folders.find(tree.listing())
        if not saves:
            return None
        return Evidence(paddle_flex_folders.why(saves), files=paddle_flex_folders.files(saves, tree.listing()))

    def read(self, tree: Tree, options: Mapping[str, object]) -> Catalog:
        """The catalog, from the metadata and the headers of the data files. Options: `config` (a model's config),
        `require_checksums`.

        Raises Incomplete (E1330 not finished, E1336 files or keys missing, E0309 elements), InconsistentCheckpoint (E1332,
        E1337, E1339, E0308), InputError (E1331, E1333 to E1335, E1338), and what pickles and files raise.
        """
        saves = paddle_flex_folders.find(tree.listing())
        if not saves:
            raise UnknownFormat(
                "no N.metadata and no R_N.distcp: this is no flex checkpoint", code="E0393",
                path=tree.display(), hint="pass the folder that holds model_state/, or the one with 0.metadata",
            )  # fmt: skip
        catalog = _Reading(tree, saves, options).catalog()
        catalog.check()
        return catalog

    def fit(self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], options: Mapping[str, Any]) -> Fitted:
        """The tensors to write; see `formats.paddle_flex.fit`."""
        from ckpt_tool.formats.paddle_flex.fit import fit

        return fit(tensors, extras, options)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The whole output; see `formats.paddle_flex.target`."""
        from ckpt_tool.formats.paddle_flex.target import flex_target

        return flex_target(wanted)


FORMAT = _Flex()


class _Reading:
    """One read: the tensors of all folders, put into one catalog."""

    def __init__(self, tree: Tree, saves: Sequence[Save], options: Mapping[str, object]) -> None:
        self.tree, self.saves, self.options = tree, saves, options
        self.notes = paddle_flex_folders.check(
            saves, tree.display(), tree.names(), lenient=bool(options.get("lenient"))
        )
        self.files = DataFiles(tree)
        self.trainer = bool(saves[0].folder)
        self.listings: dict[str, Listing] = {}
        self.tensors: dict[TensorKey, LogicalTensor] = {}
        self.roots: Mapping[str, str] = {}

    def catalog(self) -> Catalog:
        self._listings()
        for save in self.saves:
            self._add(save, self.listings[save.folder])
        beside = read_extras(self.tree)
        for tensor in beside.tensors.values():
            self._put(tensor, "beside the folders")
        degrees, hints = self._hints()
        required = bool(self.options.get("require_checksums"))
        checks = checksums.missing(self.tree, self.tensors.values(), required=required)
        data = [file for listing in self.listings.values() for file in listing.files]
        metadata = [save.folder + save.metadata for save in self.saves if save.metadata]
        return Catalog(
            "paddle-flex",
            self.tensors,
            beside.extras,
            Mesh.of_degrees(degrees) if degrees.get("dp", 1) % degrees.get("ep", 1) == 0 else Mesh(),
            (*metadata, *dict.fromkeys(data), *beside.files, *(name for name in (META,) if self.tree.exists(name))),
            tuple(name for name in self.tree.names() if hf_files.is_sidefile(name)),
            (*self.notes, *self._job_notes(), *(checks if required else ())),
            tuple(
                dict.fromkeys(
                    (*(u for each in self.listings.values() for u in each.unsafe), *self.files.unsafe, *beside.unsafe)
                )
            ),
            hints,
            indexes=tuple(metadata),
        )

    def _listings(self) -> None:
        for save in self.saves:
            if save.metadata is None:
                continue
            listing = read_metadata(self.tree, save.folder, save.metadata)
            paddle_flex_folders.refuse_other_save(save, listing.files, self.tree.display(save.folder + save.metadata))
            check_files(self.tree, save.folder, listing.files, save.metadata)
            self.listings[save.folder] = listing
        bare = [save.folder + name for save in self.saves if save.metadata is None for name in save.data]
        self.files.read((*(file for listing in self.listings.values() for file in listing.files), *bare))
        for save in self.saves:
            if save.metadata is None:
                old = old_ema(save, self.listings, self.files)
                self.listings[save.folder] = old.listing
                copies = (
                    f"; {len(old.rounded)} of them lie there in 16 bits too, which is left out" if old.rounded else ""
                )
                self.notes.append(Note(
                    "N-ema-without-metadata", f"{save.folder} has no metadata (an older Trainer's): its tensors are placed as "
                    f"the other folders place the same rank's{copies}", self.tree.display(save.folder),
                ))  # fmt: skip

    # -- tensors --------------------------------------------------------------------------------------------------------

    def _add(self, save: Save, listing: Listing) -> None:
        entries = list(listing.entries.values())
        kind = save.kind or (self.tree.root.name if self.tree.root.name in paddle_flex_folders.FOLDERS else "")
        if kind:
            keys = [trainer_key(kind, entry.key) for entry in entries]
        else:
            plain = plain_keys((entry.key, entry.path) for entry in entries)
            keys, self.roots = plain.keys, plain.roots
        recorded: list[str] = []
        config = self._config()
        for key, entry in zip(keys, entries, strict=True):
            parts = side_by_side(key.name, config)
            chunks = chunks_of_entry(entry, self.files, parts if kind else ())
            path = entry.path if len(entry.path) > 1 else ()
            self._put(LogicalTensor(key, entry.shape, entry.dtype, chunks, path), save.folder)
            if not kind and fused_blocks(entry, parts):
                recorded.append(entry.key)
        if recorded:
            self.notes.append(Note(
                "N-fused-as-recorded", f"{len(recorded)} fused gate and up weights lie in blocks and are taken as recorded: a fleet "
                "job with tensor parallelism would mean rank after rank, an auto-parallel one means this. If it was a fleet job, "
                f"move the files into a folder {MODEL_FOLDER}: {', '.join(recorded[:5])}", self.tree.display(), recorded[0],
            ))  # fmt: skip
        self._unlisted(save, listing)

    def _put(self, tensor: LogicalTensor, where: str) -> None:
        known = self.tensors.setdefault(tensor.key, tensor)
        if known is not tensor:
            raise InconsistentCheckpoint(
                f"two keys mean the same tensor: one lies in {where}", code=TWICE, path=self.tree.display(),
                key=str(tensor.key), hint="files of two saves lie together: remove those of the older one",
            )  # fmt: skip

    def _unlisted(self, save: Save, listing: Listing) -> None:
        """Keys of the data files that the metadata does not list: averages keep them, elsewhere they are left over."""
        found = self.files.unlisted(listing.entries, listing.files)
        left = []
        for key, homes in found.items():
            name = trainer_key(EMA_FOLDER, key)
            if save.kind != EMA_FOLDER or name in self.tensors or save.metadata is None:
                left.append(key)
                continue
            saved = [self.files.of(file)[key] for file in homes]
            if len({(one.shape, one.dtype) for one in saved}) > 1:
                raise InconsistentCheckpoint(
                    "the metadata does not list it, and ranks hold it in different shapes", code="E2201", key=str(name),
                    path=self.tree.display(homes[0]), hint="nothing says how the parts make up the tensor",
                )  # fmt: skip
            shape, dtype = saved[0].shape, saved[0].dtype
            if dtype.name == "U16":  # Paddle has no such tensors: its bits are a bfloat16
                dtype = DTYPES["BF16"]
            chunks = mark_replicas(chunk for one in saved for chunk in chunks_of(one, whole(shape), dtype=dtype))
            self._put(LogicalTensor(TensorKey(name.name, EMA), shape, dtype, chunks), save.folder)
        if left:
            self.notes.append(Note(
                "N-unlisted-keys", f"{len(left)} keys of the data files are not in the metadata and are left out: "
                f"{', '.join(left[:10])}", self.tree.display(save.folder),
            ))  # fmt: skip

    # -- what is not tensors ------------------------------------------------------------------------------------------------

    def _hints(self) -> tuple[dict[str, int], dict[str, Any]]:
        ranks = max(len(save.data) for save in self.saves)
        degrees, version = degrees_of(self.listings.values(), ranks) if self.trainer else ({}, "")
        own: dict[str, Any] = {"flex": "trainer" if self.trainer else "plain", "sharding": version}
        if self.trainer:
            own["sharding_degree"] = degrees.get("dp", 1) if version else 1
            own["names"] = self._names()
        else:
            own["roots"] = dict(self.roots)
            own["safetensors"] = any(name.endswith(".safetensors") for name in self.saves[0].data)
        config = self._config()
        if config:
            own["config"] = config
        globals_ = dict.fromkeys((*(g for each in self.listings.values() for g in each.globals), *self.files.globals))
        hints = {"dialect": "paddle", "paddle": own, "globals": list(globals_)}
        return degrees, hints | ({"degrees": degrees} if degrees else {})

    def _names(self) -> dict[str, str]:
        """Structured -> static, in the model's order; {} where the tables do not say it of every trained parameter."""
        known = statics(self.listings, self.files)
        trained = {key.name for key in self.tensors if key.state not in (MODEL, EMA, EXTRAS)}
        listing = self.listings.get(f"{MODEL_FOLDER}/")
        if listing is None or not trained or any(len(known.get(name, ())) != 1 for name in trained):
            return {}
        order = dict.fromkeys((*listing.entries, *sorted(trained)))
        return {name: next(iter(known[name])) for name in order if len(known.get(name, ())) == 1}

    def _config(self) -> dict[str, Any]:
        """The plain scalars of the model's config: `--config`, else the folder's own."""
        said = self.options.get("config")
        if not isinstance(said, Mapping) and self.tree.exists("config.json"):
            raw = self.tree.read_whole("config.json", limit=CONFIG_LIMIT)
            said = parse(raw, path=self.tree.display("config.json"))
        if not isinstance(said, Mapping):
            return {}
        return {key: value for key, value in said.items() if value is None or type(value) in (bool, int, float, str)}

    def _job_notes(self) -> Iterable[Note]:
        names = [name for name in self.tree.names() if _JOB.fullmatch(name)]
        if names:
            yield Note("N-job-files", f"files of the job, not copied: {', '.join(names[:20])}")
        if self.trainer:
            others = sorted({path.partition("/")[0] for path in self.tree.listing() if "/" in path}
                            - {save.kind for save in self.saves})  # fmt: skip
            if others:
                yield Note("N-other-folders", f"other folders beside, not read: {', '.join(others[:20])}")
