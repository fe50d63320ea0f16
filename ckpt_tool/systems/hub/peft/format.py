"""Format `peft`: an adapter folder of Hugging Face's PEFT: weights trained in addition to a frozen base, and a config.

Specification
-------------
    adapter_config.json           one JSON object: `peft_type` and that method's settings, keys sorted, indent 2
    adapter_model.safetensors     the tensors, `__metadata__` {"format": "pt"}; or adapter_model.bin, a torch.save file
    non_lora_state_dict.bin       (a trainer's) weights of the base that were trained in full: `formats.adapters`;
                                  numbered files (non_lora_state_dict-00001-of-00002.bin) are one set
    README.md                     the model card; more adapters of one model are in sub-folders, each a folder like this

Names are those of the wrapped model without the adapter's own name (`default`), so every one begins `base_model.model.`
and goes on with the base's module path. Of LoRA, `M` a module of the base, r the rank, shapes as torch's:

    M.lora_A.weight (r, in)   M.lora_B.weight (out, r)   M.lora_B.bias (out,)  linear; convolutions have (r, in, kernel)
    M.lora_embedding_A (r, rows)   M.lora_embedding_B (dim, r)                 embeddings: parameters, no `.weight`
    M.lora_magnitude_vector (out,)                                             DoRA (`use_dora`), without `.weight`
    M.lora_A.weight (e r, in), M.base_layer.lora_A.weight ...                  `target_parameters`: stacked experts; a
        module with several of them nests one level each, in the order of registration, the first innermost
    M.weight, M.bias                                                           `modules_to_save`: whole tensors
    M.base_layer.weight, M.base_layer.bias                                     the base's own, of a targeted embedding,
        or a trained bias (`bias` of `all`, `lora_only`)
    M.token_adapter.trainable_tokens_delta (n, dim)                            `trainable_token_indices`: whole rows

Scaling is `lora_alpha / r`, with `use_rslora` `lora_alpha / sqrt(r)`; `rank_pattern` and `alpha_pattern` override both
by module. Source: PEFT 0.21.2 `utils/save_and_load.py`, `config.py` (save_pretrained),
`tuners/lora/{config,layer,model}.py`.

Example: a folder of rank 4 on q_proj of two layers is a catalog of 4 tensors of state `model` under those names, the
config in `hints["peft"]["config"]`, `sidefiles == ("README.md",)`.

Written: `adapter_model.safetensors` and the config as PEFT writes it, from the source's own config: so the source must
be an adapter; the config of one of Megatron's is made from the run's (`conversion.adapter_names`). The arithmetic of
adapters is in `adapters.fold` (`ckpt merge --method lora`). Cost: as `safetensors`. Holds the model alone. If a folder
has a complete model next to the adapter, it is read as the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import Catalog, Note, Unread
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import CorruptFile, Incomplete, InternalError, UnknownFormat, UsageError
from ckpt_tool.formats.adapters.beside import (
    is_of_trained,
    join_tensors,
    read_state_dict,
    read_trained,
    refuse_lost_parts,
    trained_files,
)
from ckpt_tool.formats.adapters.lone import CONFIG, PeftHints, is_adapter, without_config
from ckpt_tool.formats.base import AS_IS, Evidence, Holds, ReadOptions
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.storage.safetensors_files.safetensors_entries import warning_code
from ckpt_tool.storage.safetensors_files.safetensors_file import build_header, read_header
from ckpt_tool.storage.safetensors_files.safetensors_table import HeaderTable
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts.strict_json import parse
from ckpt_tool.systems.hub.peft.mlx import FILE as MLX
from ckpt_tool.systems.hub.peft.mlx import is_mlx, read_mlx

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import Target, Wanted

SAFE = "adapter_model.safetensors"
BIN = "adapter_model.bin"
CONFIG_LIMIT = 16 << 20  # bytes: a rank for each module of the largest models has a few megabytes
METADATA = {"format": "pt"}
NO_WEIGHTS = "E1431"
NOT_AN_ADAPTER = "E1433"


class Peft:
    """The format `peft`. Option of `read`: `lenient` (bool), as for `safetensors`."""

    name = "peft"
    holds = Holds(all_states=False, extras=False, dialect="hf", adapter=True, dtypes=frozenset({"C128"}))

    def detect(self, tree: Tree) -> Evidence | None:
        """Claim a folder by its file names.

        If the weights of the base are there too, transformers loads the base, so `turn` ranks the adapter behind it.
        """
        names = tree.names() if tree.single is None else ()
        weights = next((name for name in (SAFE, BIN, MLX) if name in names), None)
        if CONFIG not in names or weights is None:
            return None
        files = [CONFIG, weights]
        if weights == MLX:
            files += [name for name in names if name.endswith(f"_{MLX}")]  # older steps of it
        return Evidence(f"{CONFIG} and {weights}", files=frozenset(files), loader="transformers", turn=2)

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from headers alone.

        Raises CorruptFile E1423 (config), Incomplete E1431 (no weights), E1432 (a .bin that is no state dict), and what
        the containers raise.
        """
        config = _config(tree)
        names = tree.names()
        if is_mlx(config):
            return self._read_mlx(tree, config)

        if SAFE not in names and BIN not in names:
            raise Incomplete(
                f"neither {SAFE} nor {BIN} is here",
                code=NO_WEIGHTS,
                path=tree.display(),
                hint="fetch the weights into the folder of the config",
            )

        file = SAFE if SAFE in names else BIN  # PEFT prefers safetensors too
        sidefiles = hf_files.side_files(tree)
        refuse_lost_parts(names, tree.display())
        trained = trained_files(names)
        listed = (name for name in tree.seen(names) if name != CONFIG and not is_of_trained(name))
        notes = hf_files.ignored(listed, (file, *trained, *sidefiles))
        tensors: Mapping[TensorKey, LogicalTensor]
        unsafe: tuple[str, ...] = ()
        unread: tuple[Unread, ...] = ()

        if file == SAFE:
            header = read_header(tree, SAFE, lenient=options.lenient)
            notes += tuple(Note(warning_code(warning), warning, SAFE) for warning in header.warnings)
            tensors = HeaderTable([header])
        else:
            tensors, unread, unsafe = read_state_dict(tree, BIN)

        for beside in trained:
            more, more_unread, more_unsafe = read_trained(tree, beside, lenient=options.lenient)
            tensors = join_tensors(tensors, more, beside, tree.display())
            unread += more_unread
            unsafe += more_unsafe
            notes += (Note("W-trained", f"{beside}: {len(more)} weights trained in full, read with the adapter"),)

        notes += _notes(unread) if unread else ()
        return Catalog(
            self.name,
            tensors,
            files=(CONFIG, file, *trained),
            sidefiles=sidefiles,
            notes=notes,
            unsafe=unsafe,
            hints=Hints.of(PeftHints(config)),
            unread=unread,
        )

    def _read_mlx(self, tree: Tree, config: Mapping[str, Any]) -> Catalog:
        if not tree.exists(MLX):
            raise Incomplete(
                f"this is an adapter of mlx-lm's, and its {MLX} is not here",
                code=NO_WEIGHTS,
                path=tree.display(),
                hint="fetch the weights into the folder of the config",
            )
        tensors, peft_config = read_mlx(tree, config)
        listed = (name for name in tree.names() if name != CONFIG)
        notes = hf_files.ignored(listed, (MLX,))
        note = Note("W-mlx", "an adapter of mlx-lm's: lora_a and lora_b are PEFT's lora_A and lora_B, transposed", MLX)
        return Catalog(
            self.name, tensors, files=(CONFIG, MLX), notes=(note, *notes), hints=Hints.of(PeftHints(peft_config))
        )

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The plan of one safetensors file and the config. Raises UsageError E1433 if the source is no adapter."""
        return _target(wanted)


FORMAT = Peft()


def _config(tree: Tree) -> dict[str, Any]:
    """The content of adapter_config.json. Raises UnknownFormat E0393, CorruptFile E1423."""
    if not tree.exists(CONFIG):
        if tree.single is None and not {SAFE, BIN, MLX} & set(tree.names()):
            raise UnknownFormat(
                f"no {CONFIG} here", code="E0393", path=tree.display(), hint="pass the folder that holds it"
            )
        raise without_config(tree)
    value = parse(tree.read_whole(CONFIG, limit=CONFIG_LIMIT), path=tree.display(CONFIG))
    if isinstance(value, dict) and is_mlx(value):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("peft_type"), str):
        raise CorruptFile(
            "the adapter's config is no JSON object that names its peft_type",
            code="E1423",
            path=tree.display(CONFIG),
            place="/peft_type",
            hint="fetch the adapter again",
        )
    return value


def _notes(unread: tuple[Unread, ...]) -> tuple[Note, ...]:
    from ckpt_tool.formats.state_dict.unread import notes_of

    return tuple(notes_of(unread))


def _target(wanted: Wanted) -> Target:
    from ckpt_tool.core.target import Target, TargetArray, TargetFile, whole_file

    if any(tensor.key.state != "model" for tensor in wanted.tensors):
        raise InternalError("a model-only format was asked for training state")
    hint = wanted.hints.get(PeftHints)
    if hint is None and is_adapter(tensor.key for tensor in wanted.tensors):
        raise UsageError(
            f"there is no adapter config to write: the source is an adapter whose {CONFIG} is missing",
            code=NOT_AN_ADAPTER,
            hint=f"put the adapter's {CONFIG} next to its weights, and pass the folder",
        )
    if hint is None:
        raise UsageError(
            "peft holds adapters, and the source is none: there is no adapter config to write",
            code=NOT_AN_ADAPTER,
            hint="a whole model goes to --to safetensors",
        )
    rows = [(each.key.name, each.dtype, each.shape) for each in wanted.tensors]
    head, offsets, size = build_header(rows, METADATA)
    arrays = tuple(
        TargetArray(row, whole(each.shape), offset)
        for row, (each, offset) in enumerate(zip(wanted.tensors, offsets, strict=True))
    )
    copies = tuple(TargetFile(path, nbytes, copy_of=path) for path, nbytes in wanted.sidefiles if path != CONFIG)
    text = json.dumps(hint.config, indent=2, sort_keys=True).encode()
    return Target(Peft.name, (TargetFile(SAFE, size, ((0, head),), arrays), whole_file(CONFIG, text), *copies))
