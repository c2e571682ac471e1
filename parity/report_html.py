"""The record as one self-contained page: verdict, what decided, where it broke, what to try; then plots and all numbers."""

from __future__ import annotations

from html import escape

from . import report_plots
from .report import advice, decisive, distance, mark, provenance, uncovered, where

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f5f6f8; --ink: #16181d; --muted: #565d6b; --grid: #d9dce3;
  --candidate: #1f6feb; --reference: #a35a00; --limit: #c62828; --pass: #1a7f37; --fail: #c62828; --inconclusive: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #191d24; --ink: #e8eaee; --muted: #a3abb8;
  --grid: #333a45; --candidate: #6cb0ff; --reference: #f0a840; --limit: #ff7b72; --pass: #2ea043; --fail: #e5534b;
  --inconclusive: #c69026; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--page); color: var(--ink);
  font: 17px/1.5 system-ui, sans-serif; }
header { border-left: .8rem solid var(--tone); background: var(--card); padding: 1rem 1.5rem; border-radius: .4rem; }
h1 { margin: 0; font-size: 2.6rem; line-height: 1.1; color: var(--tone); }
h2 { margin: 2rem 0 .5rem; font-size: 1.25rem; }
p { margin: .4rem 0; }
.number { font-size: 1.6rem; font-weight: 650; }
.quiet { color: var(--muted); font-size: .95rem; font-weight: 400; }
ul { margin: .3rem 0; padding-left: 1.3rem; }
li, td { overflow-wrap: break-word; } td:nth-child(2) { white-space: nowrap; }
td code, li { overflow-wrap: anywhere; } .wide td:nth-child(2) { white-space: normal; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .95rem; }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { color: var(--muted); font-weight: 600; }
.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.FAIL td { font-weight: 650; } tr.off td { color: var(--muted); }
.ok .mark { color: var(--pass); } .FAIL .mark { color: var(--fail); } .mark { font-weight: 700; white-space: nowrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .8rem; background: var(--card); border-radius: .4rem; }
figure svg { width: 100%; height: auto; display: block; } figure text { font-family: inherit !important; }
figcaption { color: var(--muted); font-size: .9rem; }
summary { cursor: pointer; margin-top: 1.5rem; font-size: 1.25rem; font-weight: 650; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""


def page(record: dict) -> str:
    """The whole page. Nothing in it is fetched from anywhere."""
    verdict = record["verdict"]
    title = f"olmo-parity: {verdict.upper()}"
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>",
        f'<header style="--tone: var(--{escape(verdict)})"><h1>{escape(verdict.upper())}</h1>',
        f"<p>{escape(record['decided_by'])}</p>{_decided(record)}",
        f'<p class="quiet">{escape(record["candidate"]["path"])}, {escape(record["created"])}, exit code '
        f"{record['exit_code']}, {record['seconds']:.0f} s</p></header>",
        _list("Where it broke", where(record)),
        _list("What to try", advice(record)),
        _list("Not covered by this run", [f"{c['what']}: {c['detail']}" for c in uncovered(record)]),
        "<h2>Criteria</h2>",
        _criteria(record),
        '<h2>Plots</h2><div class="plots">',
        *(
            f'<figure role="img" aria-label="{escape(caption)}">{svg}<figcaption>{escape(caption)}</figcaption></figure>'
            for svg, caption in report_plots.plots(record)
        ),
        "</div>",
        _worst(record),
        _statistics(record),
        _list("Notes", record["notes"]),
        "<details open><summary>What was judged</summary>",
        _table([], [(escape(name), f"<code>{escape(value)}</code>") for name, value in provenance(record)], "wide"),
        "</details></body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _decided(record: dict) -> str:
    c = decisive(record)
    if c is None:
        return ""
    return (
        f'<p class="number">{escape(c["leg"])}: {escape(c["name"])} = {_number(c["value"])}</p>'
        f"<p>The limit is <b>{_number(c['limit'])} {escape(c['unit'])}</b>: {escape(distance(c))}.</p>"
        f'<p class="quiet">Why this limit: {escape(c["reason"])}.</p>'
    )


def _criteria(record: dict) -> str:
    rows = []
    for c in record["criteria"]:
        sign = mark(c)
        by_hand = " (set by hand)" if c.get("set_by_hand") else ""
        cells = (
            f'<span class="mark">{escape(sign)}</span>',
            escape(c["leg"]),
            escape(c["name"]),
            _number(c["value"]),
            f"{_number(c['limit'])} {escape(c['unit'] + by_hand)}",
            escape(distance(c)),
            f'<span class="quiet">{escape(c["reason"])}</span>',
        )
        rows.append((sign.split()[0], cells))
    head = ("", "leg", "criterion", "value", "limit", "distance", "why this limit")
    return _table(head, [cells for _, cells in rows], kinds=[kind for kind, _ in rows])


def _worst(record: dict) -> str:
    rows = [
        (escape(leg), escape(w["sequence"]), str(w["position"]), str(w["token"]), str(w["logit_of_token"]),
         _number(w["abs_delta_logit"]), _number(w["kl"]), _top(w.get("top5_reference")), _top(w.get("top5_candidate")))
        for leg, numbers in record["legs"].items() for w in numbers["worst"]
    ]  # fmt: skip
    head = ("leg", "sequence", "position", "token", "logit of", "|delta|", "KL, nats", "top 5 of reference", "top 5 of candidate")  # fmt: skip
    return f"<details><summary>Worst tokens</summary>{_table(head, rows)}</details>"


def _top(entries) -> str:
    return ", ".join(f"{token} ({logit:.4g})" for token, logit in entries or [])


def _statistics(record: dict) -> str:
    columns = {}
    for name, leg in record["legs"].items():
        columns[f"{name}: candidate"] = leg["statistics"]
        if "own_noise" in leg:
            columns["bfloat16: the reference's own"] = leg["own_noise"]
            columns["bfloat16 against bfloat16"] = leg["against_reference_bfloat16"]
        if "with_flags_as_found" in leg:
            columns["bfloat16, XLA_FLAGS as found (not judged)"] = leg["with_flags_as_found"]["statistics"]
    keys = [k for k, v in next(iter(columns.values())).items() if not isinstance(v, (dict, list))]
    rows = [(escape(key), *(_number(column.get(key)) for column in columns.values())) for key in keys]
    table = _table(("statistic", *(escape(name) for name in columns)), rows)
    return f"<details open><summary>Statistics</summary>{table}</details>"


def _table(head, rows, style="", kinds=None) -> str:
    top = "<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>" if head else ""
    body = "".join(
        f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
        for kind, row in zip(kinds or [""] * len(rows), rows, strict=True)
    )
    return f'<div class="scroll"><table class="{style}">{top}{body}</table></div>'


def _list(title: str, items: list[str]) -> str:
    return f"<h2>{escape(title)}</h2><ul>{''.join(f'<li>{escape(i)}</li>' for i in items)}</ul>" if items else ""


def _number(value) -> str:
    return '<span class="n">-</span>' if value is None else f'<span class="n">{float(value):.4g}</span>'
