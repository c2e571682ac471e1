"""The faces of a preflight record: console, Markdown, JUnit XML, and writing them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as xml

from . import report, report_ci
from .preflight_options import STAGES
from .report_ci import markdown_list, markdown_text, xml_text
from .stage import BAD_INPUT, NOT_RUN

SIGNS = report_ci.SIGNS | {NOT_RUN: "➖", BAD_INPUT: "❌"}
MOST = 12  # lines about one stage, before the rest is only counted


def write_reports(record: dict, json: Path | None, junit: Path | None, markdown: Path | None) -> None:
    """Write every face that was asked for."""
    for path, face in ((json, report.as_json), (junit, as_junit), (markdown, as_markdown)):
        if path is not None:
            report.write(path, face(record))


def console(record: dict) -> str:
    """Verdict, what decided, then a row for each stage, with what to try under those that did not pass."""
    lines = [f"{record['verdict'].upper()}  {record['decided_by']}", ""]
    rows = [("stage", "verdict", "seconds", "what decided")]
    rows += [(s["stage"], _word(s), f"{s['seconds']:.1f}", decided(s)) for s in record["stages"]]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row, stage in zip(rows, [None, *record["stages"]], strict=True):
        cells = [cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True)]
        lines.append("  ".join(["", *cells, row[3]]).rstrip())
        lines += [f"      {line}" for line in _below(stage)] if stage else []
    lines.append("")
    for side in ("reference", "candidate"):
        found = record[side]
        if found:
            lines.append(
                f"  {side}  {found['path']} ({found['dtype']}), weights {(found['weights_sha256'] or '-')[:12]}"
            )
    lines.append(f"  settings   {record['settings_file'] or 'no parity.toml was used'}")
    lines.append(f"  made       {record['created']}, {record['seconds']:.0f} s")
    return "\n".join(lines)


def decided(stage: dict) -> str:
    """The number and the limit that decided a stage, or its sentence where no number did."""
    found = report.decisive(stage)
    if found is None or (stage["verdict"] == "pass" and not float(found["value"])):
        return stage["decided_by"].splitlines()[0]
    return (
        f"{found['leg']}: {found['name']} {float(found['value']):.3g}, limit {float(found['limit']):.3g} "
        f"{found['unit']} ({report.distance(found)})"
    )


def as_markdown(record: dict) -> str:
    """For a pull request or a step summary: verdict, a row for each stage, where and what to try."""
    lines = [
        f"## {SIGNS[record['verdict']]} olmo-parity preflight: {record['verdict'].upper()}",
        "",
        markdown_text(record["decided_by"]),
        "",
        "| | stage | verdict | seconds | what decided |",
        "|---|---|---|---:|---|",
    ]
    for s in record["stages"]:
        lines.append(
            f"| {SIGNS[s['verdict']]} | {s['stage']} | {s['verdict']} | {s['seconds']:.1f} | {markdown_text(decided(s))} |"
        )
    lines.append("")
    for s in record["stages"]:
        lines += markdown_list(f"{s['stage']}: {STAGES[s['stage']]}", _below(s))
    lines += ["<details><summary>What was judged</summary>", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {markdown_text(value)} |" for name, value in provenance(record)]
    return "\n".join([*lines, "", "</details>", ""])


def as_junit(record: dict) -> str:
    """A test case for each criterion and each stage's verdict. Failures: something differs; errors: no verdict."""
    suite = xml.Element("testsuite", name="olmo-parity", timestamp=record["created"], time=str(record["seconds"]))
    properties = xml.SubElement(suite, "properties")
    for name, value in provenance(record):
        xml.SubElement(properties, "property", name=xml_text(name), value=xml_text(value))
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}

    def case(stage: str, name: str, seconds: float, kind: str, message: str, text: str = "") -> None:
        counts["tests"] += 1
        group = f"olmo-parity.{stage}"
        element = xml.SubElement(suite, "testcase", classname=group, name=xml_text(name), time=str(seconds))
        if kind:
            counts[{"failure": "failures", "error": "errors"}.get(kind, kind)] += 1
            xml.SubElement(element, kind, message=xml_text(message)).text = xml_text(text) or None

    for s in record["stages"]:
        for c in s["criteria"]:
            kind = "skipped" if not c["on"] else "" if c["passed"] else "failure"
            value = f"{float(c['value']):.6g} {c['unit']}, the limit is {float(c['limit']):.6g} ({c['reason']})"
            case(
                s["stage"], f"{c['leg']} {c['name']}", 0, kind, value, "\n".join(_below(s)) if kind == "failure" else ""
            )
        kinds = {"pass": "", "fail": "failure", NOT_RUN: "skipped"}
        case(s["stage"], "verdict", s["seconds"], kinds.get(s["verdict"], "error"), s["decided_by"])
    # A case of its own: a suite must be red for every reason that the verdict may have.
    kind = {"pass": "", "fail": "failure"}.get(record["verdict"], "error")
    case("preflight", "verdict", record["seconds"], kind, record["decided_by"])
    for name, count in counts.items():
        suite.set(name, str(count))
    root = xml.Element("testsuites", {k: str(v) for k, v in counts.items()})
    root.append(suite)
    xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def provenance(record: dict) -> list[tuple[str, str]]:
    """What a record is of: both sides with their hashes, settings, versions."""
    rows = [("schema", record["schema"]), ("created", record["created"])]
    for side in ("reference", "candidate"):
        for key in ("path", "form", "dtype", "weights_sha256", "config_sha256"):
            rows.append((f"{side} {key}", str((record[side] or {}).get(key))))
    rows.append(("settings file", record["settings_file"] or "none"))
    rows += [(f"version of {name}", value) for name, value in record["versions"].items()]
    return [*rows, ("code_sha256", record["code_sha256"])]


def _word(stage: dict) -> str:
    return stage["verdict"].upper() if stage["verdict"] in ("fail", BAD_INPUT) else stage["verdict"]


def _below(stage: dict) -> list[str]:
    """Lines under a stage's row: more faults, where, what to try, what of it was not run, what else it says."""
    more = stage["decided_by"].splitlines()[1:] if stage["verdict"] == BAD_INPUT else []
    lines = [line.strip() for line in more] + stage["where"]
    if len(lines) > MOST:
        lines = [*lines[:MOST], f"and {len(lines) - MOST} more"]
    lines += [f"try: {line}" for line in stage["advice"]]
    if stage["verdict"] != NOT_RUN:
        lines += [f"not run: {why}" for why in stage["not_run"]]
    return lines + list(stage.get("said", []))
