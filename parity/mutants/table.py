"""The faces of a run of mutants: console text and Markdown. JSON is the record itself."""

from __future__ import annotations

from ..gate import VERDICTS
from .kinds import BENIGN

RULES = {"max_kl": "KL", "cosine": "cosine", "mean_abs": "|delta|"}  # field rules, as columns name them
STATES = ("killed", "survived", "too small", "invisible")


def console(record: dict) -> str:
    """Verdict, families, resolution, then every mutant."""
    lines = [f"{VERDICTS[record['exit_code']].upper()}  {record['decided_by']}", ""]
    lines += _aligned(_families(record)) + [f"  {line}" for line in _notes(record)]
    if record["graded"]:
        lines += ["", "  the smallest fault that the float32 leg still catches", *_aligned(_resolution(record))]
    lines += ["", *_aligned(_mutants(record)), ""]
    lines.append(f"  reference  {record['reference']['path']} ({record['reference']['dtype']})")
    lines.append(f"  candidate  {record['candidate']}")
    lines.append(f"  made       {record['created']}, {record['seconds']:.0f} s")
    return "\n".join(lines)


def markdown(record: dict) -> str:
    """Verdict, families and resolution; every mutant folded away."""
    lines = [f"## olmo-parity mutants: {VERDICTS[record['exit_code']].upper()}", "", record["decided_by"], ""]
    lines += [*_piped(_families(record)), "", *(f"{line}  " for line in _notes(record)), ""]
    if record["graded"]:
        lines += ["The smallest fault that the float32 leg still catches:", "", *_piped(_resolution(record)), ""]
    count = len(record["mutants"])
    lines += [f"<details><summary>All {count} mutants</summary>", "", *_piped(_mutants(record)), "", "</details>", ""]
    return "\n".join(lines)


def _families(record: dict) -> list[tuple[str, ...]]:
    """Counts by family. Field rules are counted over the mutants that can show."""
    rows = [("family", "mutants", *STATES, "trace right", *(f"stopped by {name}" for name in RULES.values()))]
    for family in dict.fromkeys(m["family"] for m in record["mutants"]):
        own = [m for m in record["mutants"] if m["family"] == family]
        if own[0]["kind"] == BENIGN:
            continue
        rows.append((family, *_counts(own)))
    faults = [m for m in record["mutants"] if m["kind"] != BENIGN]
    if faults:
        rows.append(("all faults", *_counts(faults)))
    right = [m for m in record["mutants"] if m["kind"] == BENIGN]
    return [*rows, ("right variants", *_counts(right))]


def _counts(mutants: list[dict]) -> list[str]:
    showing = [m for m in mutants if m["status"] != "invisible"]
    counts = [len(mutants), *(sum(m["status"] == state for m in mutants) for state in STATES)]
    traced = [m["trace"] for m in showing if m["trace"] and m["status"] in ("killed", "passed")]
    right = f"{sum(t['right'] for t in traced)} of {len(traced)}" if traced else ""
    field = (sum(m["field"][rule]["stops"] for m in showing) for rule in RULES)
    return [*map(str, counts), right, *map(str, field)]


def _notes(record: dict) -> list[str]:
    rules = ", ".join(f"{RULES[name]}: {r['what']}, {float(r['limit']):g}" for name, r in record["field_rules"].items())
    lines = [f"rules of the field, both sides in bfloat16: {rules}"]
    elsewhere = [m["name"] for m in record["mutants"] if m["status"] == "killed" and m.get("reason")]
    if elsewhere:
        lines.append(f"killed, although a rule says that they cannot show: {', '.join(elsewhere)}")
    return lines


def _resolution(record: dict) -> list[tuple[str, ...]]:
    rows = [("fault", "smallest caught", "largest let through", "size is")]
    for g in record["graded"]:
        caught = [s["size"] for s in g["sizes"] if s["killed"]]
        missed = [s["size"] for s in g["sizes"] if not s["killed"]]
        smallest = f"{min(caught):g}" if caught else g["reason"] or "none"
        rows.append((g["name"], smallest, f"{max(missed):g}" if missed else "-", g["unit"]))
    return rows


def _mutants(record: dict) -> list[tuple[str, ...]]:
    rows = [("mutant", "kind", "", "by", "value", "limit", "trace", *RULES.values())]
    for m in record["mutants"]:
        rows.append((m["name"], m["kind"], m["status"], *_why(m), _traced(m), *_field(m)))
    return rows


def _traced(m: dict) -> str:
    """The first faulty module, and whether that is where the fault was planted."""
    trace = m.get("trace")
    if not trace:
        return ""
    return f"{trace['first'] or 'nothing'}{'' if trace['right'] else ' (wrong)'}"


def _why(m: dict) -> tuple[str, str, str]:
    """Leg and criterion that decided, its value and limit; or why nothing could."""
    if m["status"] in ("invisible", "too small"):
        return m["reason"], "", ""
    legs = list(dict.fromkeys(c["leg"] for c in m["failed"]))
    # Of the leg that is meant to catch it; of a survivor the leg that did not, then whatever did.
    own = [c for c in m["failed"] if c["leg"] == m["leg"]] or m["failed"]
    if not own or m["status"] == "survived":
        delta = m["float32" if m["leg"] != "bfloat16" else "bfloat16"]
        name, closest = max(delta.items(), key=lambda item: _share(item[1]))
        also = f"; caught by {', '.join(legs)}" if legs else ""
        return f"closest: {name}{also}", f"{float(closest['value']):.2g}", f"{float(closest['limit']):.2g}"
    others = [leg for leg in legs if leg != own[0]["leg"]]
    by = f"{own[0]['leg']}: {own[0]['name']}" + (f" (and {', '.join(others)})" if others else "")
    return by, f"{float(own[0]['value']):.2g}", f"{float(own[0]['limit']):.2g}"


def _share(criterion: dict) -> float:
    value, limit = float(criterion["value"]), float(criterion["limit"])
    return value / limit if limit > 0 else 0.0


def _field(m: dict) -> list[str]:
    if not m["planted"]:
        return ["" for _ in RULES]
    return [f"{float(m['field'][rule]['value']):.2g}{' stops' if m['field'][rule]['stops'] else ''}" for rule in RULES]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _piped(rows: list[tuple[str, ...]]) -> list[str]:
    def line(cells):
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(rows[0]), "|" + "---|" * len(rows[0]), *map(line, rows[1:])]
