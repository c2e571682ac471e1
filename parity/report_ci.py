"""The record for a CI system: JUnit XML, and Markdown for a pull request or a step summary."""

from __future__ import annotations

import re
from xml.etree import ElementTree as xml

from .report import advice, decisive, distance, mark, provenance, statistics, uncovered, where

BAD_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
SIGNS = {"pass": "✅", "fail": "❌", "inconclusive": "⚠️"}
SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&])")


def junit(record: dict) -> str:
    """One test case for each criterion and each thing to cover. Failures: the sides differ; errors: inconclusive."""
    criteria, coverage = record["criteria"], record["coverage"]
    missing = {c["what"] for c in uncovered(record)}
    suite = xml.Element("testsuite", name="olmo-parity", timestamp=record["created"], time=str(record["seconds"]))
    properties = xml.SubElement(suite, "properties")
    for name, value in provenance(record):
        xml.SubElement(properties, "property", name=xml_text(name), value=xml_text(value))
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}

    def case(group: str, name: str):
        counts["tests"] += 1
        return xml.SubElement(
            suite, "testcase", classname=f"olmo-parity.{xml_text(group)}", name=xml_text(name), time="0"
        )

    for c in criteria:
        element = case(c["leg"], c["name"])
        value = f"{float(c['value']):.6g} {c['unit']}, the limit is {float(c['limit']):.6g} ({c['reason']})"
        if not c["on"]:
            counts["skipped"] += 1
            xml.SubElement(element, "skipped", message=xml_text(f"off: {value}"))
        elif not c["passed"]:
            counts["failures"] += 1
            failure = xml.SubElement(element, "failure", type="differs", message=xml_text(f"{c['name']} is {value}"))
            failure.text = xml_text("\n".join([*where(record), *(f"try: {line}" for line in advice(record))]))
    for c in coverage:
        element = case("coverage", c["what"])
        if c["what"] in missing:
            counts["errors"] += 1
            xml.SubElement(element, "error", type="not covered", message=xml_text(c["detail"]))
        elif not c["covered"]:
            counts["skipped"] += 1
            xml.SubElement(element, "skipped", message=xml_text(f"not covered, and accepted: {c['detail']}"))
    # The verdict is a case of its own: a suite must be red for every reason that a verdict may have.
    element = case("verdict", "verdict")
    if record["verdict"] != "pass":
        kind = "failure" if record["verdict"] == "fail" else "error"
        counts["failures" if kind == "failure" else "errors"] += 1
        xml.SubElement(element, kind, type=xml_text(record["verdict"]), message=xml_text(record["decided_by"]))
    for name, count in counts.items():
        suite.set(name, str(count))
    root = xml.Element("testsuites", {k: str(v) for k, v in counts.items()})
    root.append(suite)
    xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def markdown(record: dict) -> str:
    """A comment of moderate length: verdict, what decided, where, what to try; all numbers folded away."""
    lines = [
        f"## {SIGNS[record['verdict']]} olmo-parity: {record['verdict'].upper()}",
        "",
        markdown_text(record["decided_by"]),
        "",
    ]
    decided = decisive(record)
    if decided:
        lines += [
            f"**{markdown_text(decided['leg'])}: {markdown_text(decided['name'])}** is **{float(decided['value']):.4g}**, the limit is "
            f"{float(decided['limit']):.4g} {markdown_text(decided['unit'])}: {distance(decided)}.  ",
            f"Why this limit: {markdown_text(decided['reason'])}.",
            "",
        ]
    lines += markdown_list("Not covered by this run", [f"{c['what']}: {c['detail']}" for c in uncovered(record)])
    lines += markdown_list("Where", where(record)) + markdown_list("What to try", advice(record))
    lines += ["| | leg | criterion | value | limit | |", "|---|---|---|---:|---:|---|"]
    for c in record["criteria"]:
        sign = {"ok": "✅", "FAIL": "❌"}.get(mark(c), "➖")
        by_hand = ", set by hand" if c.get("set_by_hand") else ""
        off = "" if c["on"] else ", off"
        lines.append(
            f"| {sign} | {markdown_text(c['leg'])} | {markdown_text(c['name'])} | {float(c['value']):.3g} | {float(c['limit']):.3g} "
            f"{markdown_text(c['unit'])} | {distance(c)}{by_hand}{off} |"
        )
    lines += ["", "<details><summary>Statistics, notes, and what was judged</summary>", ""]
    for name, leg in record["legs"].items():
        lines += [f"- {markdown_text(line)}" for line in statistics(name, leg, record["published_kl"])]
    lines += [f"- note: {markdown_text(note)}" for note in record["notes"]]
    lines += [
        "",
        "| | |",
        "|---|---|",
        *(f"| {markdown_text(name)} | {markdown_text(value)} |" for name, value in provenance(record)),
    ]
    return "\n".join([*lines, "", "</details>", ""])


def markdown_list(title: str, items: list[str]) -> list[str]:
    return [f"**{title}**", "", *(f"- {markdown_text(item)}" for item in items), ""] if items else []


def markdown_text(text: str) -> str:
    """Text as itself: ids and paths are the user's and must not become links, tables or HTML."""
    return SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def xml_text(text: str) -> str:
    return BAD_IN_XML.sub("?", str(text))
