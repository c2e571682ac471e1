"""The console text of one stage that was run alone."""

from __future__ import annotations

from .report import distance, mark


def console(record: dict, own: list[str] | tuple = ()) -> str:
    """Verdict and what decided, the stage's own rows, a row for each criterion, then where, what was not shown, what to try, and notes."""
    rows = [("", "criterion", "value", "limit", "unit", "distance")]
    for c in record["criteria"]:
        numbers = f"{float(c['value']):.4g}", f"{float(c['limit']):.4g}", c["unit"]
        rows.append((mark(c), c["name"], *numbers, distance(c) if c["on"] else c["reason"]))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    table = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]).rstrip() for row in rows
    ]
    lines = [*record["where"], *(f"not shown: {text}" for text in record["open_questions"])]
    lines += [f"not run: {text}" for text in record["not_run"]] + [f"try: {text}" for text in record["advice"]]
    lines += [f"note: {text}" for text in record.get("notes", [])]
    head = f"{record['verdict'].upper()}  {record['stage']}: {record['decided_by']}"
    parts = [[head], list(own), table, lines]
    return "\n\n".join("\n".join(part) for part in parts if part)
