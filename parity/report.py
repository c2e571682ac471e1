"""One record, its faces: console text and JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from ..olmo_jax.errors import BadInput

HINTS = {
    "config": "the two configs describe different functions: compare olmo_config.json with the reference's config.json",
    "weights": "convert again, or run olmo-convert verify SOURCE TARGET to see every tensor that differs",
    "float32": "same weights, another function: look at rotary tables, masks, norms and head layout",
    "bfloat16": "float32 agrees, so this is precision: look at where casts stand, and at XLA_FLAGS",
}


def check_writable(path: Path | None) -> None:
    """Raise BadInput before the work starts where the report could not be written after it."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        what = "is a folder" if path.is_dir() else "lies in a folder that does not exist or cannot be written"
        raise BadInput(f"--json {path} {what}")


def write_json(record: dict, path: Path) -> None:
    """Write the record; NaN and infinity as strings, so that every JSON reader takes it. Replaces path atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(_plain(record), indent=1, allow_nan=False) + "\n")
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _plain(value):
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def console(record: dict) -> str:
    """The report a tired engineer reads: verdict, numbers with limits, where it broke, what to try."""
    lines = [f"{record['verdict'].upper()}  {record['decided_by']}", ""]
    rows = [("", "criterion", "value", "limit", "")]
    for c in record["criteria"]:
        mark = "ok" if c["passed"] else "FAIL"
        if not c["on"]:
            mark = "off" if c["passed"] else "off (differs)"
        rows.append((c["leg"], c["name"], f"{c['value']:.3g}", f"{c['limit']:.3g} {c['unit']}", mark))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines += ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append("")
    for name, leg in record["legs"].items():
        s = leg["statistics"]
        lines.append(
            f"  {name}: {s['tokens']} tokens, KL mean {s['kl_mean']:.2e} median {s['kl_median']:.2e} "
            f"p99 {s['kl_p99']:.2e} max {s['kl_max']:.2e} nats, |delta logit| max {s['max_abs_delta_logit']:.2e} "
            f"mean {s['mean_abs_delta_logit']:.2e}, top-1 agreement {s['top1_agreement']:.2%}"
        )
        if "own_noise" in leg:
            lines.append(
                f"    the reference's own bfloat16 noise: KL mean {leg['own_noise']['kl_mean']:.2e}; "
                f"reference bfloat16 against candidate bfloat16: {leg['against_reference_bfloat16']['kl_mean']:.2e}; "
                f"published start line {record['published_kl']:g}"
            )
    if record["verdict"] == "fail":
        lines += ["", *_where(record)]
    if record["notes"] or record["verdict"] == "inconclusive":
        lines.append("")
        for item in record["coverage"]:
            if not item["covered"] and item["what"] not in record["accepted_uncovered"]:
                lines.append(f"  not covered: {item['what']} ({item['detail']})")
        lines += [f"  note: {note}" for note in record["notes"]]
    if record["verdict"] == "inconclusive":
        lines.append("  try: leave out --only-batch, give longer prompts, or name it in --accept-uncovered")
    lines += [
        "",
        f"  reference  {record['reference']['path']} ({record['reference']['dtype']})",
        f"  candidate  {record['candidate']['path']} ({record['candidate']['dtype']})",
        f"  {record['seconds']:.0f} s",
    ]
    return "\n".join(lines)


def _where(record: dict) -> list[str]:
    failed = {c["leg"] for c in record["criteria"] if c["on"] and not c["passed"]}
    lines = []
    for d in record["config_differences"][:8]:
        lines.append(
            f"  config: {d['field']} is {d['reference']!r} in the reference, {d['candidate']!r} in the candidate"
        )
    for d in record["weight_differences"][:8]:
        lines.append(f"  weights: {d['sentence']}")
    if len(record["weight_differences"]) > 8:
        lines.append(f"  weights: and {len(record['weight_differences']) - 8} more tensors")
    for name in ("float32", "bfloat16"):
        if name in failed:
            leg = record["legs"][name]
            w = leg["worst"]
            lines.append(
                f"  {name}: worst at {w['sequence']} position {w['position']} (token {w['token']}), logit of token "
                f"{w['logit_of_token']}: |delta| {w['abs_delta_logit']:.3g}, KL {w['kl']:.3g}"
            )
            for row in leg["statistics"]["by_position"]:
                a, b = row["positions"]
                lines.append(
                    f"    positions {a} to {b}: KL mean {row['kl_mean']:.2e}, |delta logit| max {row['max_abs_delta_logit']:.2e}"
                )
    lines += [f"  try: {HINTS[leg]}" for leg in HINTS if leg in failed]
    return lines
