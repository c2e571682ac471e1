"""The faces of one record: console, JSON, JUnit, Markdown, HTML; its schema."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as xml

import jsonschema
import numpy as np
import pytest

from olmo_parity.olmo_jax.errors import BadInput
from olmo_parity.parity import report, report_ci, report_html, report_plots
from olmo_parity.parity.distribution import histogram
from tests.parity.records import criterion, record

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text())
FACES = {
    "console": report.console,
    "json": report.as_json,
    "junit": report_ci.junit,
    "markdown": report_ci.markdown,
    "html": report_html.page,
}


def inconclusive():
    found = record("pass", verdict="inconclusive", exit_code=3, decided_by="nothing differs, but: window")
    for item in found["coverage"]:
        if item["what"] == "window":
            item["covered"] = False
    return found


def broken_leg(leg, name):
    """A record in which one criterion alone fails, with a value that is not a number."""
    found = record("pass", verdict="fail", exit_code=1, decided_by=f"{leg}: {name} is nan")
    criterion(found, leg, name).update(value="nan", passed=False, margin=None)
    return found


@pytest.mark.parametrize("name", ["pass", "fail"])
def test_real_records_follow_the_documented_schema(name):
    jsonschema.Draft202012Validator(SCHEMA).validate(record(name))


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.update(schema="olmo-parity/report/0"),
        lambda r: r.pop("created"),
        lambda r: r.update(created="yesterday"),
        lambda r: r.update(verdict="passed"),
        lambda r: r.update(criteria=[]),
        lambda r: r["criteria"][0].pop("limit"),
        lambda r: r["criteria"][0].update(value=None),
        lambda r: r["candidate"].update(weights_sha256="abc"),
        lambda r: r.update(something_undocumented=1),
        lambda r: r["legs"].pop("bfloat16"),
    ],
)
def test_the_schema_refuses_what_is_no_report(damage):
    found = record("pass")
    damage(found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(found)


def test_every_top_level_key_of_the_schema_is_in_the_document():
    text = (Path(__file__).parents[2] / "docs" / "report-schema.md").read_text()
    assert [key for key in SCHEMA["properties"] if not re.search(rf"`(legs\.)?{key}[`.]", text)] == []


@pytest.mark.parametrize("face", ["console", "junit", "markdown", "html"])
@pytest.mark.parametrize(
    "made, word", [(lambda: record("pass"), "PASS"), (lambda: record("fail"), "FAIL"), (inconclusive, "INCONCLUSIVE")]
)
def test_every_face_says_the_verdict_and_what_decided(face, made, word):
    found = made()
    text = FACES[face](found)
    if face != "junit":
        assert word in text
        others = {"PASS", "FAIL", "INCONCLUSIVE"} - {word}
        assert text.index(word) < min((text.index(w) for w in others if w in text), default=math.inf)
    if word != "PASS":
        assert re.sub(r"\\|&#x27;", "", found["decided_by"]) in re.sub(r"\\|&#x27;", "", text)


@pytest.mark.parametrize("face", FACES)
def test_every_face_takes_numbers_that_are_not_finite(face):
    found = record("fail")
    for c in found["criteria"]:
        c["value"] = "nan"
    for leg in found["legs"].values():
        for values in (leg["statistics"], leg.get("own_noise", {})):
            for key, value in values.items():
                if isinstance(value, float):
                    values[key] = "inf"
            for row in values.get("by_position", []):
                row["kl_mean"] = "nan"
        for w in leg["worst"]:
            w["kl"], w["abs_delta_logit"] = "nan", math.inf
    assert "nan" in FACES[face](found)


def test_json_is_read_by_strict_readers_and_keeps_every_number():
    found = record("pass", seconds=math.inf)
    found["criteria"][0]["value"] = math.nan
    read = json.loads(report.as_json(found), parse_constant=lambda name: pytest.fail(name))
    assert read["seconds"] == "inf" and read["criteria"][0]["value"] == "nan"
    assert read["legs"] == found["legs"]


def test_console_names_decider_reason_place_and_remedy_before_the_table():
    lines = report.console(record("fail")).splitlines()
    table = next(i for i, line in enumerate(lines) if "criterion" in line and "limit" in line)
    top = "\n".join(lines[:table])
    assert top.startswith("FAIL  weights: weights that differ is 2, the limit is 0")
    for words in (
        "any is a difference",
        "model.layers.2.mlp.gate_proj.weight differs",
        "largest |delta| at built-in",
        "try: ",
    ):
        assert words in top


def test_advice_reads_bfloat16_as_precision_only_where_float32_agrees():
    precision = "float32 agrees"
    assert any(precision in line for line in report.advice(broken_leg("bfloat16", "mean KL")))
    assert not any(precision in line for line in report.advice(record("fail")))
    assert any("another function" in line for line in report.advice(broken_leg("float32", "max KL")))
    assert not any("another function" in line for line in report.advice(record("fail")))
    assert report.advice(record("pass")) == []


def test_junit_counts_failures_errors_and_skips_as_ci_reads_them():
    def counts(found):
        root = xml.fromstring(report_ci.junit(found).encode())
        suite = root.find("testsuite")
        for key in ("tests", "failures", "errors", "skipped"):
            assert root.get(key) == suite.get(key)
        kinds = [child.tag for case in suite.iter("testcase") for child in case]
        assert len(list(suite.iter("testcase"))) == int(suite.get("tests"))
        assert kinds.count("failure") == int(suite.get("failures")) and kinds.count("error") == int(suite.get("errors"))
        return int(suite.get("failures")), int(suite.get("errors")), int(suite.get("skipped"))

    assert counts(record("pass")) == (0, 0, 0)
    failed = sum(not c["passed"] for c in record("fail")["criteria"])
    assert failed and counts(record("fail")) == (failed + 1, 0, 0)
    assert counts(inconclusive()) == (0, 2, 0)
    accepted = inconclusive() | {"verdict": "pass", "exit_code": 0, "accepted_uncovered": ["window"]}
    assert counts(accepted) == (0, 0, 1)
    off = record("pass")
    off["criteria"][2].update(on=False, passed=False, value=3)
    assert counts(off) == (0, 0, 1)


def test_junit_is_red_for_a_verdict_that_no_criterion_explains():
    found = record("pass", verdict="inconclusive", exit_code=3, decided_by="noise above the cap")
    root = xml.fromstring(report_ci.junit(found).encode())
    assert root.get("errors") == "1" and "noise above the cap" in report_ci.junit(found)


NASTY = "a|b <script>alert(1)</script> `x` [l](http://e.x) & \x00\x1b \ud800"


def nasty():
    found = record("fail")
    found["legs"]["float32"]["worst"][0]["sequence"] = NASTY
    found["weight_differences"][0]["sentence"] = NASTY
    found["candidate"]["path"] = NASTY
    found["notes"] = [NASTY]
    return found


def test_names_of_the_user_stay_text_in_every_face():
    assert "<script>" not in report_html.page(nasty()).replace("&lt;script&gt;", "")
    text = report_ci.markdown(nasty())
    assert not re.search(r"(?<!\\)<script", text) and not re.search(r"(?<!\\)\[l", text)
    root = xml.fromstring(report_ci.junit(nasty()).encode())
    assert any("<script>" in (p.get("value") or "") for p in root.iter("property"))


def test_markdown_tables_have_the_same_cells_in_every_row():
    for found in (record("pass"), nasty()):
        rows = [line for line in report_ci.markdown(found).splitlines() if line.startswith("|")]
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        assert set(cells) == {7, 3}


class Page(HTMLParser):
    """Checks that every element is closed, and collects what a browser would fetch."""

    VOID = {"meta", "br", "img", "link", "input", "hr"}

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched, self.ids, self.tags = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data") and not value.startswith("#"):
                self.fetched.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()


@pytest.mark.parametrize("name", ["pass", "fail"])
def test_the_page_is_whole_and_fetches_nothing(name):
    text = report_html.page(record(name))
    page = Page(text)
    assert page.open == [] and page.fetched == []
    assert "script" not in page.tags and "link" not in page.tags and "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert page.tags.count("figure") == 5


def test_plots_take_their_colours_from_the_page_so_that_dark_mode_is_readable():
    defined = re.findall(r"--(\w+):", report_html.STYLE)
    for svg, _ in report_plots.plots(record("fail")):
        used = re.findall(r"var\(--(\w+)\)", svg)
        assert {"ink", "muted", "grid", "candidate", "limit"} <= set(used) <= set(defined)
        assert not re.findall(r"#0[1-6]0[1-6]0[1-6]", svg)
        drawn = re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", svg)
        assert set(drawn) <= {"#ffffff"}, drawn  # the transparent background
    light, dark = report_html.STYLE.split("@media (prefers-color-scheme: dark)")
    assert (
        {"page", "ink", "candidate", "limit"}
        <= set(re.findall(r"--(\w+):", dark))
        <= set(re.findall(r"--(\w+):", light))
    )


def test_plots_draw_the_limit_of_the_criterion_and_both_sides_of_bfloat16():
    captions = {
        caption.split(":")[0] + caption.split(":")[1][:12]: svg for svg, caption in report_plots.plots(record())
    }
    assert len(captions) == 5
    whole = "".join(captions.values())
    assert f"limit of mean KL: {criterion(record(), 'bfloat16', 'mean KL')['limit']:.3g}" in whole
    assert (
        "limit of max KL" in whole
        and whole.count(">reference&#x27;s own bfloat16<") + whole.count(">reference's own bfloat16<") == 2
    )


def test_the_error_by_layer_is_drawn_where_the_record_has_a_trace():
    found = record("fail")
    modules = []
    for i in range(4):
        envelope = {"error": 1e-7 if i < 2 else 0.1, "noise": 1e-7, "limit": 1e-5, "left": i >= 2}
        modules.append(
            {
                "name": f"layers.{i}.mlp_residual",
                "layer": i,
                "weights": [],
                **envelope,
                "carried": envelope,
                "inputs": "the reference's",
                "because": ["does not add what came before"] if i == 2 else [],
            }
        )
    first = "layers.2.mlp_residual"
    faulty = [m["name"] for m in modules if m["left"]]
    found["trace"] = {
        "dtype": "float32",
        "sequences": ["a"],
        "first_divergence": first,
        "faulty": faulty,
        "modules": modules,
    }
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    svg, caption = report_plots.plots(found)[-1]
    assert f"{first} is the first outside its envelope" in caption and ">layers.3.mlp_residual<" in svg
    text = report.console(found)
    assert f"trace: {first} is the first module outside its envelope: relative error 0.1, limit 1e-05" in text
    assert f"trace: certain: {first} does not add what came before" in text


def test_the_page_is_the_same_for_the_same_record():
    assert report_html.page(record()) == report_html.page(record())


def test_without_matplotlib_a_sentence_says_what_to_install_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(report_plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'olmo-parity\[html\]'"):
        report.prepare({"html": tmp_path / "r.html"}, [])
    report.prepare({"json": tmp_path / "r.json"}, [])  # only --html needs it


def test_the_other_faces_do_not_import_matplotlib():
    code = (
        "import json, sys\n"
        "from olmo_parity.parity import report, report_ci, report_html\n"
        "from tests.parity.records import record\n"
        "report.console(record()), report.as_json(record()), report_ci.junit(record()), report_ci.markdown(record())\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_old_reports_are_removed_before_the_work_and_inputs_never_are(tmp_path):
    old, prompts = tmp_path / "r.json", tmp_path / "prompts.jsonl"
    old.write_text("an old verdict")
    prompts.write_text("{}")
    with pytest.raises(BadInput, match="is an input of this run"):
        report.prepare({"json": old, "junit": prompts}, [prompts])
    assert old.exists() and prompts.exists()
    report.prepare({"json": old, "html": None}, [prompts])
    assert not old.exists() and prompts.exists()


@pytest.mark.parametrize(
    "reports, words",
    [
        ({"json": "folder"}, "is a folder"),
        ({"junit": "none/r.xml"}, "does not exist or cannot be written"),
        ({"json": "r", "markdown": "r"}, "are the same file"),
    ],
)
def test_reports_that_could_not_be_written_are_refused_before_the_work(tmp_path, reports, words):
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match=words):
        report.prepare({name: tmp_path / path for name, path in reports.items()}, [])


def test_writing_replaces_a_file_whole_and_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "r.json"
    target.write_text("old")
    report.write_reports(record(), target, tmp_path / "j.xml", tmp_path / "m.md", None)
    assert json.loads(target.read_text())["verdict"] == "pass"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["j.xml", "m.md", "r.json"]


def test_a_link_such_as_dev_stdout_is_written_through_and_neither_removed_nor_replaced(tmp_path):
    redirected, link = tmp_path / "redirected", tmp_path / "stdout"
    redirected.write_text("earlier output")
    link.symlink_to(redirected)
    report.prepare({"json": link}, [])
    assert link.is_symlink() and redirected.read_text() == "earlier output"
    report.write_reports(record(), link, None, None, None)
    assert link.is_symlink() and json.loads(redirected.read_text())["verdict"] == "pass"
    (tmp_path / "device").symlink_to("/dev/null")
    report.write_reports(record(), tmp_path / "device", None, None, None)
    assert Path("/dev/null").is_char_device()


def test_histograms_count_every_token_once():
    values = np.array([0.0, 1e-3, 1.7e-3, 2e-3, 1.0, 1e-300, 1e300, np.nan, np.inf])
    found = histogram(values)
    assert sum(found["counts"]) + found["zero"] + found["nonfinite"] == len(values)
    assert found["zero"] == 1 and found["nonfinite"] == 2
    one = histogram(np.array([1e-3, 1.7e-3, 2e-3]))
    assert one["first"] / one["bins_per_decade"] == -3 and one["counts"] == [2, 1]  # the edge is at 1.78e-3
    assert histogram(np.zeros(3)) == {"bins_per_decade": 4, "first": 0, "counts": [], "zero": 3, "nonfinite": 0}
