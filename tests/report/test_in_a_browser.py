"""Reports of each verb in a real headless browser: drawn without a fault, used by keyboard, readable, inert, alone.

Skipped where there is no chromium (`browser.program`), and the rules of axe-core where that is not there: `CKPT_AXE`
names its `axe.min.js` (npm install axe-core).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).resolve().parent))

import browser as browsers
from test_picture import FIXTURES, HOSTILE, catalog_of, data_in, names_of
from test_validation import CASE
from test_validation import document as validated

from ckpt_tool.cli import run
from ckpt_tool.report import html, palette
from ckpt_tool.report.holdings import Checkpoint, nobody
from ckpt_tool.report.inspection import inspection
from ckpt_tool.report.picture import picture
from ckpt_tool.report.validation import validation

AXE = os.environ.get("CKPT_AXE", "")
pytestmark = pytest.mark.skipif(browsers.program() is None, reason="no chromium on the PATH: no report is opened in it")
DRAWN = ("inspect", "reshard", "convert", "dialect", "merge", "apply", "diff", "states", "verify", "audit", "hostile")
PLAIN = ("validate", "latest")
WIDTHS = (400, 800, 1400)


def model(folder: Path, change: bool = False) -> Path:
    """A Llama of 4 layers as Hugging Face has it; changed, one that differs in values, a shape and a lost tensor."""
    rng = np.random.default_rng(0)
    tensors = {}
    shapes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "mlp.up_proj": (32, 16)}
    for layer in range(4):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = rng.normal(size=shape).astype("f4")
    if change:
        for layer in range(4):
            tensors[f"model.layers.{layer}.mlp.up_proj.weight"][0, 0] += 10.0 ** (layer - 3)
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        tensors["model.layers.2.self_attn.k_proj.weight"] = tensors["model.layers.2.self_attn.k_proj.weight"][:4].copy()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Path]:
    """A report of each verb, made by the tool itself but for those that would train or need hostile files."""
    root = tmp_path_factory.mktemp("reports")
    found = {name: root / f"{name}.html" for name in (*DRAWN, *PLAIN)}
    a = model(root / "a")
    b = model(root / "b", change=True)
    sharded = FIXTURES / "sharded/llama_tp4_pp2"
    plan = root / "plan.json"
    damaged = root / "damaged"
    shutil.copytree(sharded, damaged)
    file = damaged / "model.tp02_pp00.safetensors"
    file.write_bytes((data := bytearray(file.read_bytes()))[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    one_rank = root / "one_rank"
    moments = root / "moments"
    assert run(["convert", str(FIXTURES / "megatron/hybrid_tp2pp2"), str(one_rank), "--to", "sharded", "-q"]) == 0
    shutil.copytree(one_rank, moments)
    for state in ("exp_avg", "exp_avg_sq"):
        file = moments / f"{state}.safetensors"
        file.write_bytes(file.read_bytes()[:-2] + b"\x42\x42")  # of its last tensor the last value
    uneven = ("--tp", "2", "--pp", "1", "--dp", "3")
    lines = {
        "inspect": ("inspect", FIXTURES / "megatron/hybrid_tp2pp2"),
        "reshard": ("reshard", sharded, root / "o1", *uneven),
        "convert": ("convert", FIXTURES / "megatron/hybrid_tp2pp2", root / "o2", "--to", "dcp", "--dp", "3"),
        "dialect": ("convert", FIXTURES / "convert/llama/hf", root / "o5", "--to", "megatron-dist", "--tp", "2"),
        "merge": ("merge", a, root / "o3", "--remove-keys", "*.0.mlp*"),
        "diff": ("diff", a, b),
        "states": ("diff", one_rank, moments),
        "verify": ("verify", damaged),
        "audit": ("audit", b),
        "latest": ("latest", FIXTURES / "megatron/hybrid_tp2pp2"),
    }
    codes = {name: run([*map(str, line), "--report", str(found[name]), "-q"]) for name, line in lines.items()}
    assert codes == dict.fromkeys(lines, 0) | dict.fromkeys(("diff", "states", "verify", "audit"), 1)
    assert run(["reshard", str(sharded), str(root / "o4"), *uneven, "--plan", str(plan), "-q"]) == 0
    assert run(["apply", str(plan), "--report", str(found["apply"]), "-q"]) == 0
    catalog = catalog_of([(name, f"{name}.file", "F32", (2, 3)) for name in HOSTILE])
    document = {"path": HOSTILE[0], "tensors": (), "total": {"tensors": len(HOSTILE)}, "states": {}, "notes": HOSTILE}
    document["findings"] = [{"code": name, "message": name, "tensor": name, "file": name} for name in HOSTILE]
    data = picture("inspect", document, {"checkpoint": [Checkpoint(HOSTILE[0], catalog, nobody)]})
    html.save(inspection(document), str(found["hostile"]), title=HOSTILE[2], data=data)
    html.save(validation(validated(CASE)), str(found["validate"]))
    return found


@pytest.fixture(scope="module")
def chromium():
    with browsers.Browser() as browser:
        yield browser


@pytest.mark.parametrize("name", [*DRAWN, *PLAIN])
def test_a_report_is_drawn_without_a_fault(name, reports, chromium):
    tab = chromium.open(reports[name])
    assert tab.faults == []
    assert tab.value("performance.getEntriesByType('resource').length") == 0
    if name in PLAIN:
        assert tab.value("document.scripts.length") == 0
        return
    data = data_in(reports[name])
    assert tab.value("document.body.dataset.drawn") == "yes"
    held = [len(side["holders"]) for side in data["sides"]]
    assert tab.value("[...document.querySelectorAll('.ranks')].map((box) => box.childElementCount)") == held
    number = tab.value("document.getElementById('filter-count').textContent")
    assert number == f"{data['count']} of {data['count']} tensors"
    assert tab.value("document.querySelectorAll('.treemap .tile').length") > 0
    assert tab.value("document.querySelectorAll('#cut rect.box').length") > 0
    assert tab.value("document.querySelectorAll('.ribbon').length") == len(data.get("flow", ()))
    assert tab.value("document.querySelectorAll('.findings > li').length") == len(data.get("findings", ()))
    assert tab.value("document.querySelectorAll('.fallbacks > li').length") == len(data.get("fallbacks", ()))


def test_names_are_put_together_as_they_were(reports, chromium):
    tab = chromium.open(reports["inspect"])
    said = (
        "readData().then((data) => { const t = new Tensors(data); return [...t.kinds].map((_, row) => t.name(row)); })"
    )
    assert tab.value(said) == names_of(data_in(reports["inspect"]))


def test_the_table_filters_as_one_types(reports, chromium):
    tab = chromium.open(reports["inspect"])
    names = names_of(data_in(reports["inspect"]))
    first = "document.querySelector('.body .line')?.firstChild.title"
    tab.value("document.getElementById('filter').focus()")
    for typed, wanted in (("MLP", ["mlp"]), (" fc1", ["mlp", "fc1"]), (" state:master", ["mlp", "fc1"])):
        tab.type(typed)
        found = [name for name in names if all(word in name for word in wanted)]
        shown = int(tab.value("document.getElementById('filter-count').textContent").split()[0])
        assert 0 < shown == (len(found) if "state" not in typed else shown) <= len(found)
        assert tab.value(first) == found[0]
    assert tab.value(
        "[...document.querySelectorAll('.body .line')].every((l) => l.children[1].textContent === 'master')"
    )
    tab.type(" nothing-like-it")
    assert tab.value("document.querySelector('.body .line').textContent") == "no tensor fits"


def test_everything_is_reached_by_keyboard(reports, chromium):
    tab = chromium.open(reports["reshard"])
    selected = "document.getElementById('cut-name').textContent"
    stops = []
    for _ in range(40):
        tab.press("Tab")
        stop = tab.value("((at) => at.id || at.getAttribute('class') || at.tagName)(document.activeElement)")
        if stop == "BODY":
            break
        stops.append(stop)
    assert {"rank", "filter", "grid", "link", "tile", "SUMMARY"} <= {*stops}
    assert stops.count("rank") == 2 and stops.count("tile") == 1  # one stop for many: arrows go on from there
    tab.value("document.getElementById('grid').focus()")
    tab.press("Home")
    before = tab.value(selected)
    tab.press("ArrowDown", 2)
    assert tab.value(selected) != before
    line = tab.value(
        "((id) => document.getElementById(id).firstChild.title)"
        "(document.getElementById('grid').getAttribute('aria-activedescendant'))"
    )
    assert line == tab.value(selected)
    tab.value("document.querySelector('.rank').focus()")
    tab.press("ArrowRight")
    tab.press("Enter")
    assert "held by before: tp 1, pp 0" in tab.value("document.getElementById('filter-count').textContent")
    assert tab.value("document.querySelector('.rank[aria-pressed=true] .who').textContent") == "tp 1, pp 0"
    tab.value("document.querySelector('.tile').focus()")
    tab.press("Enter")
    assert tab.value("document.getElementById('filter').value").startswith("module:")
    assert tab.faults == []


def test_a_cut_before_and_after_and_its_fallback(reports, chromium):
    tab = chromium.open(reports["reshard"])
    data = data_in(reports["reshard"])
    assert tab.value(
        "[...document.querySelectorAll('#cut .cut')].map((c) => c.querySelectorAll('rect.box').length)"
    ) == [4, 6]
    assert "requested tp x dp, cut by tp x dp into uneven parts" in tab.value(
        "document.querySelector('#cut .warn').textContent"
    )
    tab.value("document.querySelectorAll('.fallbacks button')[1].click()")
    tab.settle()
    text, rows = data["fallbacks"][1]
    assert tab.value("document.getElementById('filter-count').textContent").startswith(f"{len(rows)} of")
    assert text in tab.value("document.querySelector('#cut .warn').textContent")
    boxes = "[...document.querySelectorAll('#cut .cut:last-of-type rect.box')]"
    assert tab.value(f"new Set({boxes}.map((box) => box.getAttribute('fill'))).size") >= 3


def test_differences_the_worst_first(reports, chromium):
    tab = chromium.open(reports["diff"])
    cells = tab.value(
        "[...document.querySelectorAll('.heat td button')].map((b) => [b.textContent, b.getAttribute('aria-label')])"
    )
    missing, shape, *_ = (cell[0] for cell in cells)
    assert (missing, shape) == ("\u2715", "\u25b2")
    assert cells[0][1] == "model.layers.*.self_attn.q_proj.weight, layer 1: only in the first"

    columns = "['c-what', 'c-relative', 'c-abs', 'c-ulp'].map((name) => l.querySelector('.' + name).textContent)"
    worst = tab.value(f"[...document.querySelectorAll('.body .line')].slice(0, 7).map((l) => {columns})")
    assert worst[0] == ["first only", "", "", ""] and worst[1] == ["shape", "", "", ""] and worst[6] == [""] * 4
    relative = [row[1] for row in worst[2:6]]
    assert all(re.fullmatch(r"\d\.\d\de[+-]\d\d", text) for row in worst[2:6] for text in row[1:3])
    assert [float(text) for text in relative] == sorted(map(float, relative), reverse=True)
    tab.value("document.querySelectorAll('.heat td button')[5].click()")
    assert tab.value("document.getElementById('cut-name').textContent") == "model.layers.3.mlp.up_proj.weight"


def test_the_heat_map_has_a_scale_with_numbers(reports, chromium):
    """A cell shows the power of ten of its relative change, and has the colour that the scale gives it."""
    tab = chromium.open(reports["diff"])
    background = "getComputedStyle(b).backgroundColor"
    scale = tab.value(f"[...document.querySelectorAll('.scale .step')].map((b) => [b.textContent, {background}])")
    assert [text for text, _ in scale[:8]] == ["\u22127", *(f"\u2212{n}" for n in range(6, 0, -1)), "0"]
    assert "logarithmic" in tab.value("document.getElementById('heat').innerText")
    colours = dict(scale)
    data = data_in(reports["diff"])
    names = names_of(data)
    relative = {names[row]: share for row, kind, _, _, _, share in data["differences"] if kind == "value"}
    cells = tab.value(
        "[...document.querySelectorAll('.heat td button')].map((b) => "
        f"[b.getAttribute('aria-label'), b.textContent, {background}])"
    )
    drawn = 0
    for label, text, colour in cells:
        found = re.match(r"model\.layers\.\*\.(.*), layer (\d+): values differ", label)
        if found:
            drawn += 1
            exponent = math.floor(math.log10(relative[f"model.layers.{found[2]}.{found[1]}"]))
            assert text == str(exponent).replace("-", "\u2212")
            assert colour == colours[str(max(-7, min(0, exponent))).replace("-", "\u2212")]
    assert drawn == len(relative) == 4


def test_each_state_has_rows_of_its_own_in_the_heat_map(reports, chromium):
    tab = chromium.open(reports["states"])
    rows = tab.value(
        "[...document.querySelectorAll('.heat tbody tr')].map((r) => [r.children[0].title, r.children[1].textContent])"
    )
    assert len(rows) == 2 and rows[0][0] == rows[1][0] and {state for _, state in rows} == {"exp_avg", "exp_avg_sq"}
    assert tab.value("document.querySelectorAll('.heat td button').length") == 2


def test_a_matrix_of_bytes_has_a_scale(tmp_path, chromium):
    line = [
        "reshard",
        str(FIXTURES / "sharded/llama_tp4_pp2"),
        str(tmp_path / "o"),
        "--tp",
        "1",
        "--pp",
        "1",
        "--dp",
        "24",
    ]
    assert run([*line, "--report", str(tmp_path / "r.html"), "-q"]) == 0
    tab = chromium.open(tmp_path / "r.html", width=800)
    steps = tab.value("[...document.querySelectorAll('#flow .scale li')].map((li) => li.textContent)")
    assert steps[0] == "linear:" and len(steps) == 5 and all(re.search(r"\d k?B$", step) for step in steps[1:])


def test_the_verdict_comes_first(reports, chromium):
    for name in ("reshard", "diff", "verify", "audit", "validate"):
        tab = chromium.open(reports[name], width=400)
        assert tab.value("document.querySelector('h1').nextElementSibling.className").startswith("verdict"), name
        verdict = tab.value("document.querySelector('.verdict').textContent")
        assert tab.value("document.title").endswith(verdict), name
        facts = tab.value("[...document.querySelectorAll('main > dl:first-of-type dt')].map((dt) => dt.textContent)")
        assert facts[:3] == ["command", "date", "made by"] or name == "validate"


def test_names_of_both_dialects_and_notes_are_not_folded_away(reports, chromium):
    tab = chromium.open(reports["dialect"])
    shown = "[...document.querySelectorAll('td')].filter((td) => td.checkVisibility() && !td.closest('details'))"
    cells = tab.value(f"{shown}.map((td) => td.textContent)")
    assert "model.layers.*.self_attn.q_proj.weight" in cells
    assert cells.count("decoder.layers.*.self_attention.linear_qkv.weight") == 3
    assert tab.value("document.querySelector('main > ul').checkVisibility()")


@pytest.mark.parametrize("width", WIDTHS)
def test_cut_names_keep_their_numbers(width, reports, chromium):
    """What is shown of a name has its numbers and its end; who copies or searches it gets the whole."""
    shown = "[...cell.childNodes].map((n) => n.className === 'left-out' ? '\\u2026' : n.textContent).join('')"
    cut = 0
    for name in ("inspect", "diff", "dialect"):
        tab = chromium.open(reports[name], width=width)
        rows = tab.value(
            "[...document.querySelectorAll('.body .c-tensor')].map((cell) => "
            f"[cell.title, cell.textContent, {shown}, cell.scrollWidth <= cell.clientWidth])"
        )
        assert rows
        for title, whole, text, fits in rows:
            assert title == whole and fits, text
            numbers = [part for part in whole.split(".") if part.isdigit()]
            assert [part for part in re.split(r"[.\u2026]", text) if part.isdigit()] == numbers
            assert text.rsplit(".", 1)[-1] == whole.rsplit(".", 1)[-1]
            cut += text != whole
    assert cut > 0 or width == 1400


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_are_not_cut(width, reports, chromium):
    for name in ("inspect", "diff", "reshard"):
        tab = chromium.open(reports[name], width=width)
        cut = "(cell) => cell.checkVisibility() && cell.scrollWidth > cell.clientWidth"
        cells = "[...document.querySelectorAll('.line .right, .line .c-what, .line .c-state, .line .c-shape')]"
        assert tab.value(f"{cells}.filter({cut}).map((cell) => cell.textContent)") == [], name
        assert tab.value("((grid) => grid.scrollWidth <= grid.clientWidth)(document.getElementById('grid'))"), name
    assert tab.value("document.querySelectorAll('.line .c-state').length") > 1  # at every width


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_of_names_and_ranks_show_all_they_have(width, reports, chromium):
    """Nothing of them has to be scrolled for sideways, and no text of a rank is cut."""
    for name in ("diff", "states", "dialect", "reshard", "inspect"):
        tab = chromium.open(reports[name], width=width)
        boxes = "[...document.querySelectorAll('.wide:has(.stack), .ranks:not(.dense), .rank .who span, .with-rows')]"
        wider = "(box) => box.checkVisibility() && box.scrollWidth > box.clientWidth && box.clientWidth > 0"
        assert tab.value(f"{boxes}.filter({wider}).map((box) => box.outerHTML.slice(0, 200))") == [], name


def test_paper_has_what_differs_with_whole_names(reports, chromium):
    tab = chromium.open(reports["diff"], width=800)
    tab.call("Emulation.setEmulatedMedia", media="print")
    tab.value("window.dispatchEvent(new Event('beforeprint'))")
    names = "[...document.querySelectorAll('.body .c-tensor')].map((cell) => cell.textContent)"
    differing = {names_of(data_in(reports["diff"]))[row] for row, *_ in data_in(reports["diff"])["differences"]}
    assert set(tab.value(names)) == differing
    assert tab.value("document.querySelectorAll('.body .left-out').length") == 0
    assert tab.value("getComputedStyle(document.querySelector('.head')).position") == "static"
    assert not tab.value("document.getElementById('filter').checkVisibility()")


def test_a_state_has_one_colour_on_every_page(reports, chromium):
    swatches = "document.querySelectorAll('[aria-label=states] li')"
    colours: dict[str, set[str]] = {}
    for name in ("inspect", "reshard", "convert", "diff"):
        tab = chromium.open(reports[name])
        for state, fill in tab.value(
            f"[...{swatches}].map((li) => [li.textContent, li.querySelector('rect').getAttribute('fill')])"
        ):
            colours.setdefault(state, set()).add(fill)
    assert colours == {state: {palette.STATES[state]} for state in ("model", "master", "exp_avg", "exp_avg_sq")}


def test_no_colour_means_two_things(reports, chromium):
    """States, ranks and modules, as they are drawn on one page."""
    tab = chromium.open(reports["inspect"])

    def fills(selector: str) -> set[str]:
        found = tab.value(f"[...document.querySelectorAll('{selector}')].map((rect) => rect.getAttribute('fill'))")
        return {fill for fill in found if fill.startswith("#")}

    states = fills("[aria-label=states] rect")
    ranks = fills(".rank .swatch rect")
    modules = fills(".tile > rect:first-of-type")
    assert (len(states), len(ranks)) == (4, 4) and len(modules) > 4
    assert not states & ranks and not states & modules and not ranks & modules
    assert fills("#cut rect.box") <= ranks and fills(".states rect") == states


@pytest.mark.parametrize("name", ["verify", "audit"])
def test_a_finding_leads_to_its_tensor(name, reports, chromium):
    tab = chromium.open(reports[name])
    linked = tab.value("document.querySelector('.findings button.link').textContent")
    tab.value("document.querySelector('.findings button.link').click()")
    assert tab.value("document.getElementById('cut-name').textContent") == linked
    assert tab.value("document.getElementById('filter-count').textContent").startswith("1 of")


def test_hostile_names_are_text(reports, chromium):
    tab = chromium.open(reports["hostile"])
    for index in range(len(HOSTILE)):
        tab.value(f"document.querySelectorAll('.body .line')[{index}].click()")
    tab.value("document.querySelectorAll('.findings button.link').forEach((b) => b.click())")
    tab.value("document.querySelectorAll('.tile').forEach((t) => t.dispatchEvent(new Event('click')))")
    assert tab.value("window.pwned") is None and tab.faults == []
    assert tab.value("document.scripts.length") == 2
    assert tab.value("document.querySelectorAll('img, iframe, link, object, a, form').length") == 0
    text = tab.value("document.body.innerText + document.body.textContent")
    assert "<script>window.pwned=1</script>" in text and "right\\u202eto\\u2066left\\u200b" in text
    assert not {*"\u202e\u2066\u200b\u2028\x1b"} & {*text} and "(10000 characters)" in text
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")


def test_the_text_stays_without_scripts(reports, chromium):
    for name in ("reshard", "diff"):
        tab = chromium.open(reports[name], script=False)
        text = tab.value("document.body.innerText")
        assert tab.value("document.body.dataset.drawn") is None and "The figures need a browser" in text
        assert "into uneven parts" in text if name == "reshard" else "model.layers.3.mlp.up_proj.weight" in text


def test_the_names_of_671_billion_parameters_are_inflated(tmp_path, chromium):
    names = [
        f"model.layers.{n}.mlp.experts.{e}.{w}.weight" for n in range(40) for e in range(128) for w in ("a", "b", "c")
    ]
    catalog = catalog_of([(name, f"{i % 163}.safetensors", "BF16", (64, 32)) for i, name in enumerate(names)])
    document = {"path": "run", "tensors": (), "total": {"tensors": len(names)}, "states": {}}
    data = picture("inspect", document, {"checkpoint": [Checkpoint("run", catalog, nobody)]})
    report = tmp_path / "r.html"
    html.save(inspection(document), str(report), data=data)
    assert 'data-coding="deflate"' in report.read_text()
    tab = chromium.open(report, width=900)
    tab.value("document.getElementById('filter').focus()")
    tab.type("layers.7. experts.12.")
    assert tab.value("document.getElementById('filter-count').textContent") == "3 of 15,360 tensors"
    tab.value("(() => { document.getElementById('filter').value = ''; document.getElementById('grid').focus(); })()")
    tab.type("x")
    tab.press("End")
    assert tab.value("document.querySelectorAll('.body .line').length") < 60  # rows are made for what is seen
    assert tab.faults == []


@pytest.mark.share(3)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_its_window(width, reports, chromium):
    for name in (*DRAWN, "validate"):
        tab = chromium.open(reports[name], width=width, dark=width == 900)
        assert tab.value("document.documentElement.scrollWidth") <= width, name
        parts = "[...document.querySelectorAll('section, #text, h1, h2')]"
        assert tab.value(f"{parts}.every((part) => part.getBoundingClientRect().right <= innerWidth + 1)"), name


def test_light_dark_and_paper(reports, chromium):
    grounds = set()
    for dark in (False, True):
        tab = chromium.open(reports["reshard"], width=900, dark=dark)
        grounds.add(tab.value("getComputedStyle(document.body).backgroundColor"))
        picture_ = tab.screenshot()
        width, height = struct.unpack(">II", picture_[16:24])
        assert width == 900 and height > 1500 and len(picture_) > 50_000
    assert grounds == {"rgb(255, 255, 255)", "rgb(20, 23, 27)"}
    tab.call("Emulation.setEmulatedMedia", media="print")
    tab.value("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.value("document.querySelectorAll('.body .line').length") == 21
    assert tab.call("Page.printToPDF")["data"].startswith("JVBERi")  # %PDF-
    tab = chromium.open(reports["inspect"], width=900)
    tab.value("document.getElementById('text').open = false, window.dispatchEvent(new Event('beforeprint'))")
    assert tab.value("document.getElementById('text').open")


@pytest.mark.skipif(not Path(AXE or "/nowhere").is_file(), reason="no axe-core (CKPT_AXE): its rules are not asked")
@pytest.mark.share(12)
@pytest.mark.parametrize("name", [*DRAWN, *PLAIN])
def test_the_rules_of_axe_hold(name, reports, chromium):
    rules = Path(AXE).read_text()
    for width, dark in ((400, True), (1600, False)):
        tab = chromium.open(reports[name], width=width, dark=dark)
        tab.call("Runtime.evaluate", expression=rules)
        broken = tab.value("axe.run(document).then((r) => r.violations.map((v) => [v.id, v.nodes.map((n) => n.html)]))")
        assert broken == []
