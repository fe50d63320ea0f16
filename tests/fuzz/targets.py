"""What is fuzzed: for each target a function of bytes that ends soon, and from which only `CkptError` escapes.

    pickle, zip     see `fuzz_readers`
    json            the strict JSON parser: both its roads give one verdict; the index of a folder of shards
    dcp             the bytes of a DCP `.metadata` beside a data file
    tree            a fixture in memory, its files edited: detected, read, checked (edits: `Edits`)
    plan            a saved plan, its values edited
    layout, aoa, mergekit, patterns     files and options that a person writes

The first bytes of an input of `tree` and `plan` choose what is edited, the rest says how; the others are the file
itself. What a target raises beside CkptError is a finding; its input, made small, goes to `corpus/TARGET/`, which
`test_corpus.py` replays.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
import struct
import sys
import tempfile
from collections.abc import Callable

from ckpt_tool.conversion.layout import parse_layout
from ckpt_tool.core import dtype
from ckpt_tool.core.cuts import Cuts
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.module_patterns import NotUnderstood, matches
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.merging.groups import Grouping
from ckpt_tool.merging.mergekit import read_config
from ckpt_tool.option_kinds.values import BadValue, patterns
from ckpt_tool.plan import saved
from ckpt_tool.plan.moves import Stored
from ckpt_tool.plan.placing import Wishes, lay_out
from ckpt_tool.sources.select import split_keys
from ckpt_tool.storage import source
from ckpt_tool.storage.texts import strict_json
from ckpt_tool.systems.paddle.aoa.program import compile_aoa, read_aoa
from ckpt_tool.systems.torch.dcp.format import FORMAT as DCP

HERE = pathlib.Path(__file__).parent
FIXTURES = HERE.parents[1] / "fixtures"
LARGEST = 70_000  # bytes of a fixture that is edited
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    64,
    255,
    10**4,
    2**31 - 1,
    2**31,
    10**9,
    2**53,
    2**63 - 1,
    2**64,
    10**30,
    -1,
    -2,
    -(2**63),
    1.5,
    "1",
    "",
    True,
    None,
)


def _edits():
    name = "fuzz_edits"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / "edits.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


edits = _edits()


class Files(source.Tree):
    """A tree in memory. files: path -> bytes."""

    def __init__(self, files, shown="input"):
        self.files = dict(sorted(files.items()))
        self.shown = shown
        self.single = None
        self.bytes_read = 0
        self._lock = __import__("threading").Lock()
        self.root = pathlib.Path(shown)

    def listing(self):
        return {path: len(data) for path, data in self.files.items()}

    def size(self, path):
        return self.views.size(path) if source.is_view(path) else len(self._data(path))

    def fd(self, path):
        self._data(path)
        return -1

    def identity(self, path):
        return source.Identity(0, 0, len(self._data(source.base_of(path))), 0, 0)

    def below(self, folder):
        inner = {path[len(folder) + 1 :]: data for path, data in self.files.items() if path.startswith(f"{folder}/")}
        return Files(inner, f"{self.shown}/{folder}")

    def read(self, path, offset, nbytes):
        if source.is_view(path):
            return self.views.read(path, offset, nbytes)
        data = self._data(path)
        if offset < 0 or nbytes < 0 or offset + nbytes > len(data):
            raise source.CorruptFile(f"{nbytes} bytes at {offset} of {len(data)}", code="E0311", path=path, hint="-")
        self.bytes_read += nbytes
        return data[offset : offset + nbytes]

    def _data(self, path):
        if path not in self.files:
            raise source.missing_file(path, self.display(path))
        return self.files[path]


class Script:
    """Bytes as numbers, one after the other; 0 behind the end."""

    def __init__(self, data):
        self.data = data
        self.at = 0

    def more(self):
        return self.at < len(self.data)

    def byte(self):
        self.at += 1
        return self.data[self.at - 1] if self.at <= len(self.data) else 0

    def below(self, limit):
        value = self.byte() if limit <= 256 else self.byte() << 8 | self.byte()
        return value % limit if limit else 0

    def bytes(self, count):
        self.at += count
        return self.data[self.at - count : self.at]


# -- files of checkpoints ----------------------------------------------------------------------------------------------


@functools.cache
def fixtures():
    """(name, {path: bytes}) of the small checkpoints, in a fixed order."""
    found = []
    for folder in sorted(path for path in FIXTURES.glob("*/*") if path.is_dir() and path.parent.name != "make"):
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        if folder.parent.name == "families":
            files.pop("paddle.safetensors", None)
        tops = {path.split("/")[0] for path in files if path.startswith(("iter_", "global_step")) and "/" in path}
        for top in sorted(tops) or [""]:
            inner = {path.removeprefix(f"{top}/"): data for path, data in files.items() if path.startswith(top)}
            found.append((f"{folder.parent.name}/{folder.name}", inner))
    found = [(name, files) for name, files in found if sum(map(len, files.values())) <= LARGEST or _first(name)]
    return found


def _first(name):
    """Formats whose fixtures are all large are there with one of them."""
    return name in (
        "megatron/moe_tp2ep2etp1",
        "megatron-dist/pp2_gathered",
        "paddle/llama_bf16_legacy_tp2",
        "paddle-unified/ernie_nm_tp2",
        "paddle-flex/llama_tied_pp2",
        "deepspeed/moe_z2_ep2_dp4",
        "deepspeed/z3_bf16_dp4",
        "deepspeed-universal/z1_bf16_dp2",
        "torch/ranks_tp2_dp2",
        "dcp/hsdp_2x2",
    )


@functools.cache
def part(which, path):
    """The editable part of a file of a fixture, and its numbers."""
    found = edits.part_of(fixtures()[which][1][path])
    return (found, edits.numbers(found)) if found else (None, [])


def one_tree(data):
    """Which fixture, then edits: of a number, of a span of a part's bytes, of a whole file."""
    script = Script(data)
    which = script.below(len(fixtures()))
    files = dict(fixtures()[which][1])
    paths = sorted(files)
    changed = {}
    for _ in range(8):
        if not script.more():
            break
        kind = script.byte() % 8
        path = paths[script.below(len(paths))]
        if kind == 0:
            files.pop(path, None)
        elif kind == 1:
            files[path] = files.get(paths[script.below(len(paths))], b"")
        elif kind == 2 and path in files:
            files[path] = files[path][: script.below(len(files[path]) + 1)]
        elif path in files:
            changed.setdefault(path, []).append(_edit(script, kind, *part(which, path)))
    for path, made in changed.items():
        own, _ = part(which, path)
        if own is not None and path in files:
            files[path] = own.file(_edited(own, made))
    read_tree(files)


def from_corpus(target, data):
    """The input of a kept file: those of `tree` begin with the fixture's name, whose number may change."""
    if target != "tree":
        return data
    name, _, script = data.partition(b"\n")
    which = [name for name, _ in fixtures()].index(name.decode())
    return (bytes([which]) if len(fixtures()) <= 256 else struct.pack(">H", which)) + script


def _edit(script, kind, own, numbers):
    """(start, end, new bytes) of one edit of the part."""
    if own is None:
        return (0, 0, b"")
    if kind in (3, 4, 5) and numbers:
        number = numbers[script.below(len(numbers))]
        value = NUMBERS[script.below(len(NUMBERS))]
        new = edits.as_opcode(value) if own.kind == "pickle" else json.dumps(value).encode()
        return (number.start, number.end, new)
    if kind == 6 and numbers:  # one number in the place of another
        one = numbers[script.below(len(numbers))]
        other = numbers[script.below(len(numbers))]
        return (one.start, one.end, own.data[other.start : other.end])
    start = script.below(len(own.data) + 1)
    end = min(len(own.data), start + script.byte() % 24)
    return (start, end, script.bytes(script.byte() % 24))


def _edited(own, made):
    data = own.data
    at = len(own.data) + 1
    for start, end, new in sorted(made, reverse=True):
        if end <= at:
            at = start
            data = edits.spliced(data, start, end, new) if own.kind == "pickle" else data[:start] + new + data[end:]
    return data


def read_tree(files):
    """Detect, read, check; look at every tensor."""
    tree = Files(files)
    try:
        fmt, _ = registry.detect(tree)
        catalog = fmt.read(tree, ReadOptions(lenient=False))
        seen(catalog)
    except CkptError as error:
        told(error)


def seen(catalog):
    for row in catalog.rows():
        assert row.nbytes >= 0 and all(n >= 0 for n in row.shape)
    catalog.check()
    catalog.states()
    for tensor in catalog.tensors.values():
        for chunk in tensor.chunks:
            assert chunk.array.offset >= 0 and chunk.box.inside(tensor.shape)


def told(error):
    str(error), error.to_json(), error.where()


def one_dcp(data):
    """A DCP folder whose `.metadata` is these bytes."""
    tree = Files({".metadata": data, "__0_0.distcp": bytes(4096), "__1_0.distcp": bytes(512)})
    try:
        if DCP.detect(tree):
            seen(DCP.read(tree))
    except CkptError as error:
        told(error)


def one_json(data):
    """Both roads of the parser, and the readers of the files that are JSON alone."""
    try:
        value = strict_json.parse(data, path="input")
    except CkptError as error:
        told(error)
        value = error.code
    try:
        exact = strict_json._Exact(data, "input", 0, "")
        slow, end = exact.value(0)
        exact.expect_end(end)
    except CkptError as error:
        slow = error.code
    assert repr(value) == repr(slow), (value, slow)
    shard = fixtures_shard()
    for name in ("model.safetensors.index.json", "ckpt.index.json", "adapter_config.json", "metadata.json"):
        read_tree({name: data, "model-00001-of-00001.safetensors": shard, "adapter_model.safetensors": shard})


@functools.cache
def fixtures_shard():
    return edits.struct.pack("<Q", 64) + b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'.ljust(64) + b"abcd"


# -- plans -------------------------------------------------------------------------------------------------------------


@functools.cache
def plans():
    """Two small plans as text: made here, from fixtures, by the commands."""
    from ckpt_tool.cli import run

    found = []
    for name, more in (("sharded/padded_dp4", []), ("safetensors/llama_tied", ["--tp", "2"])):
        with tempfile.TemporaryDirectory() as scratch:
            path = f"{scratch}/plan.json"
            code = run(
                ["convert", f"{FIXTURES / name}", f"{scratch}/out", "--to", "sharded", *more, "--plan", path, "-q"]
            )
            assert code == 0, name
            found.append(pathlib.Path(path).read_text())
    return found


def nodes(value, trail=()):
    """Every place of a JSON document, as the keys that lead there."""
    yield trail
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from nodes(each, (*trail, key))


@functools.cache
def plan_nodes(which):
    return [trail for trail in nodes(json.loads(plans()[which])) if trail]


def at(document, trail):
    for key in trail:
        document = document[key]
    return document


def one_plan(data):
    """Which plan, then edits of its values."""
    script = Script(data)
    which = script.below(len(plans()))
    document = json.loads(plans()[which])
    places = plan_nodes(which)
    for _ in range(8):
        if not script.more():
            break
        kind = script.byte() % 6
        trail = places[script.below(len(places))]
        try:
            holder = at(document, trail[:-1])
            old = at(document, trail)
            if kind <= 1:
                holder[trail[-1]] = NUMBERS[script.below(len(NUMBERS))]
            elif kind == 2:
                holder[trail[-1]] = at(document, places[script.below(len(places))])
            elif kind == 3:
                del holder[trail[-1]]
            elif kind == 4 and isinstance(holder, list):
                holder.append(old)
            else:
                holder[trail[-1]] = script.bytes(script.byte() % 16).decode("latin-1")
        except (KeyError, IndexError, TypeError):
            continue
    read_plan(document)


def read_plan(document):
    """As `ckpt apply` reads it, sealed anew: an edit by someone who knows how."""
    try:
        document = json.loads(json.dumps({key: value for key, value in document.items() if key != "seal"}))
    except (ValueError, RecursionError):  # a value inside itself
        return
    try:
        document = saved.sealed(document)
        saved.check_seal(document, "plan.json")
        plan = saved.read_plan(document, "plan.json")
        plan.identifier(), plan.bytes_read, plan.bytes_written
    except CkptError as error:
        told(error)


# -- what a person writes ----------------------------------------------------------------------------------------------


@functools.cache
def names():
    inner = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.up_proj",
        "mlp.gate_proj",
        "input_layernorm",
    )
    layers = [f"model.layers.{i}.{name}.weight" for i in range(4) for name in inner]
    experts = [f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(4)]
    return ["model.embed_tokens.weight", *layers, *experts, "model.norm.weight", "lm_head.weight"]


@functools.cache
def stored():
    found = {}
    for name in names():
        array = StoredArray("model.safetensors", 0, dtype.DTYPES["F32"], (8,) if "norm" in name else (16, 8))
        found[name] = Stored(0, simple_tensor(TensorKey(name), array))
    return found


def one_layout(data):
    try:
        degrees, rules = parse_layout(data, "layout.toml")
        wanted = [WantedTensor(row.tensor.key, row.tensor.shape, row.tensor.dtype) for row in stored().values()]
        layout, _ = lay_out(wanted, Wishes(Mesh.of(**degrees), rules=rules))
        if layout.mesh.size <= 1024:
            cuts = Cuts(layout)
            for index, item in enumerate(wanted):
                cuts.of(index, item.shape)
    except CkptError as error:
        told(error)


def one_aoa(data):
    text = data.decode("utf-8", "replace")
    shapes = {name: row.tensor.shape for name, row in stored().items()}
    for reverse, wanted in ((False, None), (True, shapes)):
        try:
            statements, turned = read_aoa(text)
            compile_aoa(statements, shapes, reverse=turned or reverse, wanted=wanted)
        except CkptError as error:
            told(error)


_CONFIG = pathlib.Path(tempfile.mkdtemp(prefix="ckpt-fuzz-")) / "config.yaml"


def one_mergekit(data):
    """The models are `.` and `..`, which there are."""
    _CONFIG.write_bytes(data)
    try:
        job = read_config(str(_CONFIG))
        grouping = Grouping(job, dict.fromkeys(job.models(), stored()), names())
        grouping.groups()
    except CkptError as error:
        told(error)


def one_patterns(data):
    """Patterns a line: globs to remove, and the module patterns of adapters. (Regular expressions are Python's own
    engine.)"""
    lines = [line for line in data.decode("utf-8", "replace").split("\n") if line and not line.startswith(("@", "re:"))]
    keys = [TensorKey(name) for name in names()]
    try:
        split_keys(keys, remove=patterns(lines), keep=())
    except (CkptError, BadValue) as error:
        str(error)
    for line in lines[:4]:
        try:
            matches(line, "model.layers.1.self_attn.q_proj")
        except NotUnderstood as error:
            str(error)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "json": one_json,
    "dcp": one_dcp,
    "tree": one_tree,
    "plan": one_plan,
    "layout": one_layout,
    "aoa": one_aoa,
    "mergekit": one_mergekit,
    "patterns": one_patterns,
}


# -- seeds -------------------------------------------------------------------------------------------------------------


def seeds():
    """(target, bytes) to start from."""
    for name, files in fixtures():
        for path, data in files.items():
            own = edits.part_of(data)
            if own and own.kind == "json" and len(own.data) < 6000:
                yield "json", own.data
            if path.endswith(".metadata") and name.startswith("dcp/"):
                yield "dcp", data
    for which, (_, files) in enumerate(fixtures()):
        wide = len(fixtures()) > 256
        yield "tree", struct.pack(">H", which) if wide else bytes([which])
        for number in range(len(files)):
            yield "tree", bytes([which, 3, number, 5, 10])
            yield "tree", bytes([which, 7, number, 30, 4, 4]) + b"\x80\x02]."
    for which in range(2):
        yield from (
            ("plan", bytes([which, kind, n >> 8, n & 255, 5, 1])) for kind in range(6) for n in (3, 40, 200, 700)
        )
    yield (
        "layout",
        b'[mesh]\ntp = 2\nep = 2\n[[rule]]\nmatch = "*.q_proj.weight"\nshard = { 0 = ["tp"] }\nat = {pp = 0}\n',
    )
    yield "layout", b'mesh.tp = 4\n[[rule]]\nmatch = "*"\nstate = "exp_*"\nshard = { 0 = "tp", 1 = ["dp"] }\n'
    for text in (
        "model.layers.$LAYER_ID.self_attn.q_proj.weight^T -> q.$LAYER_ID\n",
        "model.layers.$LAYER_ID.self_attn.q_proj.weight, model.layers.$LAYER_ID.self_attn.k_proj.weight,"
        " model.layers.$LAYER_ID.self_attn.v_proj.weight -> qkv.$LAYER_ID, fused_qkv, num_heads=4, "
        "num_key_value_groups=4, axis=0",
        "model.layers.1.mlp.experts.*.up_proj.weight -> stack, axis=0\nlm_head.weight -> _\n_ -> new",
        "lm_head.weight -> a, b, axis=1\na -> c, permute='[1, 0]'\nb -> d, dtype='float16'",
        '{"aoa_statements": ["lm_head.weight -> x_[0:2], axis=0"], "aoa_config_reverse": false}',
        "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight -> f, fused_ffn",
    ):
        yield "aoa", text.encode()
    yield (
        "mergekit",
        b"merge_method: linear\nmodels:\n  - model: .\n    parameters: {weight: [0.3, {filter: mlp, value: 1}]}\n  "
        b"- model: ..\ndtype: float32\n",
    )
    yield (
        "mergekit",
        b"merge_method: passthrough\nslices:\n  - sources:\n    - {model: ., layer_range: [0, 2]}\n  - sources:\n  "
        b"  - {model: .., layer_range: [1, 4]}\n",
    )
    yield (
        "mergekit",
        b"merge_method: ties\nbase_model: .\nmodels: [{model: .., parameters: {weight: 1, density: [0.1, "
        b"0.9]}}]\nparameters: {normalize: true}\ntokenizer_source: base\n",
    )
    yield "patterns", b"model.layers.[01].*\n*norm*\nlm_head.weight"
    yield "patterns", b"layers.[01].self_attn.(q|k)_proj\n(a|b)*c{1,3}\n*.[!a-z]*?"
