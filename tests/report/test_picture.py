"""The data of a report's figures, and the page around it: exact, small, inert, and made for --report alone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from math import prod
from pathlib import Path

import pytest

from ckpt_tool.cli import run
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.report_data import collect_report_data, keep_for_report
from ckpt_tool.core.tensor import StoredArray, TensorKey, simple_tensor
from ckpt_tool.options.reading import Reading
from ckpt_tool.report import html
from ckpt_tool.report.holdings import Checkpoint, list_catalog_holdings, nobody
from ckpt_tool.report.inspection import inspection
from ckpt_tool.report.page import Page
from ckpt_tool.report.picture import picture

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
HOSTILE = (
    "<script>window.pwned=1</script>",
    "</script><script>window.pwned=1</script>",
    "\"'><img src=x onerror=window.pwned=1>",
    "]]>--><!--\u2028\u2029",
    "right\u202eto\u2066left\u200b",
    "esc\x1b[31m &lt; \\u003c {{7*7}} ${1}`",
    "__proto__.constructor",
    "x" * 10_000,
    "model.layers.007.w",
    "0.1.2",
)


class Read(HTMLParser):
    """Tags of a page, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags = list[str]()
        self.texts = dict[str, list[str]]()
        self.attributes = list[tuple[str, str]]()
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._inside = tag if tag in ("script", "style") else ""
        if self._inside:
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside:
            self.texts[self._inside][-1] += data


def names_of(data) -> list[str]:
    """Every name, put together as the script does."""
    found = []
    for text in data["rows"].split(" "):
        kind, *numbers = text.split(".")
        first, *rest = data["templates"][data["kinds"][int(kind)][0]]
        found.append(first + "".join(number + part for number, part in zip(numbers, rest, strict=True)))
    return found


def data_in(path: Path):
    """The data of a saved report."""
    found = re.search(r'<script type="application/json" id="data"([^>]*)>(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    text = found[2]
    return json.loads(zlib.decompress(base64.b64decode(text)) if "deflate" in found[1] else text)


def catalog_of(names) -> Catalog:
    tensors = (
        simple_tensor(TensorKey(name), StoredArray(file, 0, DTYPES[dtype], shape)) for name, file, dtype, shape in names
    )
    return Catalog("safetensors", {tensor.key: tensor for tensor in tensors})


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ("sharded/fsdp2_tp2_dp2", "reshard {src} {out} --tp 1 --dp 3"),
        ("megatron/hybrid_tp2pp2", "convert {src} {out} --to dcp --dp 3"),
        ("deepspeed/z3_bf16_dp4", "convert {src} {out} --to sharded --dp 2"),
        ("convert/llama/hf", "convert {src} {out} --to megatron --tp 2 --pp 3"),
    ],
    ids=lambda text: text.split("/")[0] if "{" not in text else None,
)
def test_every_byte_of_the_output_comes_from_somewhere(source, command, tmp_path, capsys):
    report = tmp_path / "r.html"
    out = tmp_path / "out"
    words = [word.format(src=FIXTURES / source, out=out) for word in command.split()]
    assert run([*words, "--report", str(report), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    data = data_in(report)
    before, after = data["sides"]
    # what flows to a rank is what it holds then, and what it holds is what its files have of tensors
    for number, holder in enumerate(after["holders"]):
        assert sum(n for _, to, n in data["flow"] if to == number) == sum(n for _, n in holder["states"].values())
    assert {file for holder in after["holders"] for file in holder["files"]} <= {
        file["path"] for file in said["target"]["files"]
    }
    # every cut covers its tensor, on both sides
    for kind in data["kinds"]:
        shape = data["shapes"][kind[3]]
        for side, cut in zip((before, after), kind[4:], strict=True):
            boxes = side["cuts"][cut][0]
            assert sum(prod(box[len(shape) :]) if box else prod(shape) for box in boxes) == prod(shape)
    assert data["count"] == sum(state["tensors"] for state in said["states"].values())


@pytest.mark.parametrize(
    "line",
    [
        "reshard sharded/fsdp2_tp2_dp2 --tp 1 --dp 3",
        "convert dcp/strides --to sharded --dp 2",
        "convert paddle/ernie_bf16_io_tp2sd2v2 --to sharded --dialect hf",
        "convert deepspeed/z3_bf16_dp4 --to dcp --dp 3",
    ],
    ids=lambda line: line.split()[1].partition("/")[0],
)
def test_a_saved_plan_draws_the_same(line, tmp_path):
    verb, source, *options = line.split()
    plan = str(tmp_path / "p.json")
    line = [verb, str(FIXTURES / source), str(tmp_path / "out"), *options, "--plan", plan]
    assert run([*line, "--report", str(tmp_path / "a.html")]) == 0
    assert run(["apply", plan, "--report", str(tmp_path / "b.html")]) == 0
    planned, applied = (data_in(tmp_path / f"{name}.html") for name in "ab")
    for each in (planned, applied):
        del each["fallbacks"], each["sides"][0]["mesh"]
    assert planned == applied


def test_ranks_of_each_format(capsys):
    """Whose a file is, as its name says, and a file where it does not."""
    for source, names in {
        "megatron/moe_tp2ep2etp1": ["tp 0, ep 0", "tp 1, ep 1"],
        "megatron-dist/llama_tp2": ["rank 0", "rank 1"],
        "deepspeed/z1_bf16_dp4": ["dp 0, mp 0", "dp 1, mp 0", "dp 2, mp 0", "dp 3, mp 0", "mp 0"],
        "paddle/ernie_bf16_io_tp2sd2v2": [f"tp {tp}, shard {at}" for at in (0, 1) for tp in (0, 1)],
        "paddle-flex/llama_tied_pp2": ["rank 0", "rank 1"],
        "meta/llama2_tp2": ["tp 0", "tp 1"],
        "sharded/llama_tp4_pp2": [f"tp {tp}, pp {pp}" for pp in (0, 1) for tp in range(4)],
        "dcp/tp2_dp2": [f"rank {rank}" for rank in range(4)],
    }.items():
        assert run(["inspect", str(FIXTURES / source), "--placement", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        ranks = {tuple(c["rank"].items()) for tensor in document["tensors"] for c in tensor["chunks"]}
        assert {", ".join(f"{dim} {at}" for dim, at in rank) for rank in ranks} == set(names), source
        with collect_report_data() as seen:
            inspect(str(FIXTURES / source), Reading())
        held = list_catalog_holdings(seen["checkpoint"][0].catalog, seen["checkpoint"][0].rank_of)
        assert sorted(holder.name for holder in held.holders) == sorted(names), source
        total = sum(row["bytes"] for row in document["states"].values())
        assert sum(holder.nbytes for holder in held.holders) >= total and held.of_ranks


def test_671_billion_parameters_fit_into_two_megabytes(tmp_path):
    """The names and shapes of DeepSeek-V3, 92,000 tensors in 163 files."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
    import deepseek_shape

    rows = [
        (name, f"model-{number:05d}-of-000163.safetensors", dtype, shape)
        for number, file in enumerate(deepseek_shape.packed(), 1)
        for name, dtype, shape in file
    ]
    catalog = catalog_of(rows)
    document = {"path": "run", "format": "safetensors", "tensors": (), "total": {"tensors": len(rows)}, "states": {}}
    data = picture("inspect", document, {"checkpoint": [Checkpoint("run", catalog, nobody)]})
    text = html.document(inspection(document), data=data)
    assert len(rows) == 91_991 and len(text.encode()) < 500_000
    assert names_of(data) == [name for name, *_ in rows]


def test_what_a_checkpoint_says_is_inert():
    catalog = catalog_of([(name, "<b>file</b>", "F32", (2,)) for name in HOSTILE])
    document = {
        "path": "<i>",
        "tensors": [],
        "total": {"tensors": len(HOSTILE)},
        "states": {"<u>": {"tensors": 1, "bytes": 8}},
    }
    data = picture("inspect", document, {"checkpoint": [Checkpoint("<i>", catalog, nobody)]})
    text = html.document(inspection(document), data=data)
    read = Read(text)
    assert read.tags.count("script") == 2 and read.tags.count("style") == 1
    assert not {"img", "b", "i", "u", "iframe", "link", "a", "base", "form"} & {*read.tags}
    assert not [name for name, _ in read.attributes if name.startswith("on") or name in ("style", "src", "href")]
    raw = text.partition('id="data">')[2].partition("</script>")[0]
    assert not {*"<>&\u2028\u2029\u202e\x1b"} & {*raw} and json.loads(raw)["count"] == len(HOSTILE)
    policy = next(value for _, value in read.attributes if value.startswith("default-src"))
    for tag, kind in (("script", "script-src"), ("style", "style-src")):
        code = read.texts[tag][-1]
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert not re.search(
        r"\beval\b|innerHTML|outerHTML|insertAdjacent|document\.write|new Function", read.texts["script"][-1]
    )
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", "".join(sum(read.texts.values(), []))
    )


def test_a_page_without_figures_has_no_script():
    text = html.document(Page("ckpt help", ()))
    assert "<script" not in text and "script-src" not in text and "<noscript" not in text


def test_nothing_of_it_is_loaded_or_told_without_a_report(tmp_path):
    source = str(FIXTURES / "sharded/llama_tp4_pp2")
    code = (
        "import sys\nfrom ckpt_tool.cli import run\n"
        f"assert run(['inspect', {source!r}]) == 0\n"
        f"assert run(['reshard', {source!r}, {str(tmp_path / 'o')!r}, '--tp', '2']) == 0\n"
        "sys.exit(bool({'ckpt_tool.report.holdings', 'ckpt_tool.report.picture', 'ckpt_tool.report.html', "
        "'ckpt_tool.conversion.rewriting'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_what_is_not_listed_is_not_drawn(tmp_path):
    report = tmp_path / "r.html"
    assert run(["inspect", str(FIXTURES / "sharded/llama_tp4_pp2"), "--match", "*mlp*", "--report", str(report)]) == 0
    names = names_of(data_in(report))
    assert names and all("mlp" in name for name in names)


def test_the_witness_hears_while_it_is_wanted():
    with collect_report_data() as seen:
        keep_for_report("a", lambda: 1)
    with collect_report_data(False) as none:
        keep_for_report("a", lambda: 1 / 0)
    keep_for_report("a", lambda: 1 / 0)
    assert seen == {"a": [1]} and none == {}
