"""`ema_state/` before it had a metadata file: each rank's averages as the optimizer held them.

    0_0.distcp   {"model.layers.0.mlp.gate.weight": T, "master_weights": {"linear_3.w_0": ("linear_3.w_0_fp32_master_0", T)}}

Averages of fp32 parameters lie under their structured names, the others under static ones (some versions have a 16-bit copy
under the structured name too, which is left out), in the rank's own layout: whole, or as a padded slice of the flattened block. Paddle loads such a file into the same job alone. It can be placed all the same: other
files say which static name is which parameter (`paddle_flex.names`), and the `master_weight/` (or, for fp32 parameters,
`model_state/`) of the same rank says which part of it the rank held.

Source: PaddleFormers 1.2.0 `trainer/utils/zero_cost_checkpoint.py` (`ema_state_dict`), `trainer/trainer.py` (`_is_fc_format_ema`:
without metadata it is this kind). What it does not do: ranks whose layout no other folder tells (named in the error).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.errors import InputError
from ckpt_tool.formats.paddle.file import Saved
from ckpt_tool.formats.paddle_flex.folders import EMA_FOLDER, MASTER_FOLDER, MODEL_FOLDER, Save
from ckpt_tool.formats.paddle_flex.keys import MASTER_SUFFIX
from ckpt_tool.formats.paddle_flex.metadata import Entry, Listing, Shard
from ckpt_tool.formats.paddle_flex.names import statics
from ckpt_tool.formats.paddle_flex.read import DataFiles

UNPLACED = "E1338"
MASTERS = "master_weights"
HINT = "load and save it with Paddle in a job of the same degrees, or remove the folder to go on without it"


class _Home(NamedTuple):
    """The entry of another folder that shares the average's layout, and the file of the same rank there."""

    entry: Entry
    file: str


class OldEma(NamedTuple):
    """listing: as if a metadata file had it. rounded: keys left out, 16-bit copies of averages that are there in fp32."""

    listing: Listing
    rounded: tuple[str, ...]


def old_ema(save: Save, listings: Mapping[str, Listing], files: DataFiles) -> OldEma:
    """The averages as if a metadata file listed them. listings: of the other folders, by folder. Raises InputError E1338."""
    made = Listing(save.folder)
    known = _parameters(save, listings, files)
    rounded: dict[str, None] = {}
    for masters in (True, False):
        for name in save.data:
            file = save.folder + name
            made.files[file] = None
            for key, saved in [*files.of(file).items()]:
                if (saved.path[0] == MASTERS) is not masters:
                    continue
                if not masters and saved.dtype.bits == 16 and key + MASTER_SUFFIX in made.entries:
                    rounded[key] = None
                    files.forget(file, key)
                    continue
                home = _home(saved, name, listings, known)
                if home is None:
                    raise _unplaced(key, files.tree.display(file))
                shard = _shard(saved, home, file, files.tree.display(file))
                if shard is not None:
                    _add(made, home.entry, shard, _cut(saved, shard))
                    files.rename(file, key, home.entry.key, _cut(saved, shard))
    return OldEma(made, tuple(rounded))


def _parameters(save: Save, listings: Mapping[str, Listing], files: DataFiles) -> dict[str, list[str]]:
    """Static name -> structured names, by all that is said of them."""
    known: dict[str, list[str]] = {}
    for structured, names in statics(listings, files).items():
        for static in names:
            known.setdefault(static, []).append(structured)
    for name in save.data:
        for key, saved in files.of(save.folder + name).items():
            if saved.path[0] != MASTERS and saved.name and key not in known.setdefault(saved.name, []):
                known[saved.name].append(key)
    return known


def _add(made: Listing, home: Entry, shard: Shard, saved: Saved) -> None:
    dtype = DTYPES["BF16"] if saved.dtype.name == "U16" else saved.dtype  # Paddle has no uint16 tensors
    entry = made.entries.setdefault(home.key, Entry(home.key, (home.key,), dtype, home.shape, []))
    entry.shards.append(shard)


def _unplaced(key: str, shown: str) -> InputError:
    return InputError(
        f"nothing says which part of which parameter this is: the {EMA_FOLDER} has no metadata, and no other folder has the "
        "same rank's layout", code=UNPLACED, path=shown, key=key[:200], hint=HINT,
    )  # fmt: skip


def _cut(saved: Saved, shard: Shard) -> Saved:
    """A slice without its padding."""
    if shard.span is None or len(saved.parts) != 1:
        return saved
    shape = (shard.span[1] - shard.span[0],)
    return saved._replace(shape=shape, parts=(replace(saved.parts[0], shape=shape),))


def _home(saved: Saved, name: str, listings: Mapping[str, Listing], known: Mapping[str, list[str]]) -> _Home | None:
    """What another folder says about the parameter that this is the average of. known: static -> structured names."""
    folder = MODEL_FOLDER if saved.path[0] != MASTERS else MASTER_FOLDER
    listing = listings.get(f"{folder}/")
    if listing is None or len(saved.path) != (1 if folder == MODEL_FOLDER else 2):
        return None
    file = f"{folder}/{name}"
    if folder == MODEL_FOLDER:
        entry = listing.entries.get(str(saved.path[0]))
        return None if entry is None else _Home(entry, file)
    entries = [listing.entries.get(structured + MASTER_SUFFIX) for structured in known.get(str(saved.path[1]), ())]
    found = [entry for entry in entries if entry is not None]
    mine = [entry for entry in found if any(shard.file == file for shard in entry.shards)]
    return _Home((mine or found)[0], file) if found else None


def _shard(saved: Saved, home: _Home, file: str, shown: str) -> Shard | None:
    """Where the average lies: as its home's shard of the same rank does; a whole one wherever only one box fits it. None for
    a slice that is padding alone, or one that another rank of the same data holds too."""
    mine = [shard for shard in home.entry.shards if shard.file == home.file]
    numel = prod(saved.shape)
    blocks = [s for s in mine or home.entry.shards if s.span is None and prod(s.shape) == numel]
    if len({(s.offset, s.shape) for s in blocks}) == 1:
        return blocks[0]._replace(file=file, replica=0)
    flat = [s for s in home.entry.shards if s.span is not None]
    if len(saved.shape) == 1 and flat and not blocks:
        if not mine:
            return None
        if len(mine) == 1 and mine[0].span and mine[0].span[1] - mine[0].span[0] <= numel:
            return mine[0]._replace(file=file, replica=0)
    raise InputError(
        f"an average of shape {list(saved.shape)} fits no one part of its parameter of shape {list(home.entry.shape)}",
        code=UNPLACED, path=shown, key=home.entry.key, hint=HINT,
    )  # fmt: skip
