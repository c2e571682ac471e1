"""One record, its faces: what all of them say, console text, JSON, and writing them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from ..olmo_jax.errors import BadInput
from . import also, gradients, trace_report

MOST_NAMED = 8  # fields or tensors listed before the rest is only counted


def write_reports(
    record: dict, json: Path | None, junit: Path | None, markdown: Path | None, html: Path | None
) -> None:
    """Write every face that was asked for."""
    from . import report_ci, report_html

    for path, face in (
        (json, as_json),
        (junit, report_ci.junit),
        (markdown, report_ci.markdown),
        (html, report_html.page),
    ):
        if path is not None:
            write(path, face(record))


def prepare(reports: dict[str, Path | None], inputs: list[Path | None]) -> None:
    """Before the work starts: raise BadInput where a report could not be written after it, and remove the reports of an
    earlier run, so that no old verdict stands there should this run end without one. reports: by option name."""
    given = {name: path for name, path in reports.items() if path is not None}
    faults, seen = [], {}
    kept = {Path(p).absolute() for p in inputs if p is not None}
    for name, path in given.items():
        if path.is_dir():
            faults.append(f"--{name} {path} is a folder")
        elif not os.access(path.absolute().parent, os.W_OK):
            faults.append(f"--{name} {path} lies in a folder that does not exist or cannot be written")
        elif path.absolute() in kept:
            faults.append(f"--{name} {path} is an input of this run and would be overwritten")
        elif path.absolute() in seen:
            faults.append(f"--{name} and --{seen[path.absolute()]} are the same file {path}")
        seen[path.absolute()] = name
    if "html" in given:
        from . import report_plots

        report_plots.require_matplotlib()
    if faults:
        raise BadInput("the reports cannot be written", faults)
    for path in given.values():
        if _is_ours(path):
            path.unlink()


def _is_ours(path: Path) -> bool:
    """A plain file may be removed and replaced. A link may not: /dev/stdout is one, to a file where output is redirected."""
    return path.is_file() and not path.is_symlink()


def write(path: Path, text: str) -> None:
    """Replace path atomically; a link or a device is written through."""
    if path.exists() and not _is_ours(path):
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def as_json(record: dict) -> str:
    """The record; NaN and infinity as strings ("nan", "inf", "-inf"), so that every JSON reader takes it."""
    return json.dumps(_plain(record), indent=1, allow_nan=False) + "\n"


def _plain(value):
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decisive(record: dict) -> dict | None:
    """The criterion that decided: the first that failed; on a pass the one closest to its limit. None where none did."""
    judged = [c for c in record["criteria"] if c["on"]]
    if record["verdict"] == "fail":
        return next((c for c in judged if not c["passed"]), None)
    if record["verdict"] == "pass":
        return min((c for c in judged if c["margin"]), key=lambda c: c["margin"], default=None)
    return None


def distance(criterion: dict) -> str:
    """How far a value is from its limit, in words."""
    value, limit = float(criterion["value"]), float(criterion["limit"])
    if not math.isfinite(value):
        return "no finite number"
    if limit == 0 or value == 0:
        return "none at all" if value <= limit else "must not occur"
    return f"{limit / value:.3g} times below" if value <= limit else f"{value / limit:.3g} times above"


def mark(criterion: dict) -> str:
    """ok, FAIL or off, as tables say it."""
    if criterion["on"]:
        return "ok" if criterion["passed"] else "FAIL"
    # A value of NaN that does not decide was never measured.
    return "off" if criterion["passed"] or math.isnan(float(criterion["value"])) else "off (differs)"


def uncovered(record: dict) -> list[dict]:
    """What this run could not show and nobody accepted."""
    return [c for c in record["coverage"] if not c["covered"] and c["what"] not in record["accepted_uncovered"]]


def where(record: dict) -> list[str]:
    """Where it broke: config fields, weights, worst tokens. Empty where nothing failed."""
    lines = [
        f"config: {d['field']} is {d['reference']!r} in the reference, {d['candidate']!r} in the candidate"
        for d in record["config_differences"]
    ]
    lines = _first(lines, "config: and {} more fields")
    lines += _first([f"weights: {d['sentence']}" for d in record["weight_differences"]], "weights: and {} more tensors")
    if record.get("trace"):
        lines += [
            f"trace: {line}"
            for line in (trace_report.headline(record["trace"]), *trace_report.details(record["trace"]))
        ]
    failed = _failed_legs(record)
    beside = record["legs"]["float32"].get("also")
    if beside and beside["odd_one_out"]:
        lines.append(f"three sides: {beside['odd_one_out']['sentence']}")
    for name, leg in record["legs"].items():
        if name in failed:
            w = leg["worst"][0]
            lines.append(
                f"{name}: largest |delta| at {w['sequence']} position {w['position']} (token {w['token']}), logit of token "
                f"{w['logit_of_token']}: |delta| {float(w['abs_delta_logit']):.3g}, KL {float(w['kl']):.3g}"
            )
    lines += gradient_lines(record) if gradients.LEG in failed else []
    lines += [f"points at: {label}" for label in record["labels"]]
    return lines if record["verdict"] == "fail" else []


def gradient_lines(record: dict) -> list[str]:
    """Both losses and norms, and the parameters that are furthest off."""
    found = record["gradients"]
    lines = [
        f"gradients: {what} {float(found[key]['reference'] if key == 'global_norm' else found[key]['reference']['loss']):.8g} "
        f"in the reference, {float(found[key]['candidate'] if key == 'global_norm' else found[key]['candidate']['loss']):.8g} "
        f"in the candidate"
        for key, what in (("loss", "loss"), ("global_norm", "global norm"))
    ]
    lines += [f"gradients: {fault}" for fault in found["faults"][:MOST_NAMED]]
    for row in found["worst"][:3]:
        cosine = "undefined" if row["cosine"] is None else f"{float(row['cosine']):.6f}"
        lines.append(
            f"gradients: {row['name']} relative L2 error {float(row['relative_error']):.3g}, cosine {cosine}, norm "
            f"{float(row['norm_reference']):.3g} in the reference, {float(row['norm_candidate']):.3g} in the candidate"
        )
    return lines


def advice(record: dict) -> list[str]:
    """What to try. Later legs are only read as a sign of something where the earlier ones agree."""
    failed = _failed_legs(record)
    lines = []
    if "config" in failed:
        lines.append("the two configs describe different functions: compare olmo_config.json with config.json")
    if "weights" in failed:
        lines.append(
            "olmo-convert verify SOURCE TARGET names every tensor; then convert again, or find who changed the source"
        )
    if failed & {"float32", "bfloat16"} and failed & {"config", "weights"}:
        lines.append("the logits are judged on unequal models: put config and weights right before reading them")
    elif "float32" in failed:
        traced = trace_report.advice(record["trace"]) if record.get("trace") else []
        lines += traced or ["same weights, another function: look at rotary tables, masks, norms and head layout"]
    elif gradients.LEG in failed and "float32" not in failed:
        lines.append("the forward passes agree in float32: look at the loss, custom gradients and stop_gradient")
    elif "bfloat16" in failed:
        lines.append("float32 agrees, so this is precision: look at where casts stand, and at XLA_FLAGS")
    if also.LEG in failed:
        lines.append("ask which of the three is wrong before anything else: a gate is worth no more than its reference")
    if record["verdict"] == "inconclusive" and uncovered(record):
        lines.append("leave out --only-batch, give longer prompts, or name it in --accept-uncovered")
    return lines


def provenance(record: dict) -> list[tuple[str, str]]:
    """What a report is of: both sides with their hashes, settings, versions."""
    rows = [("schema", record["schema"]), ("created", record["created"]), ("profile", record["profile"])]
    for side in ("reference", "candidate"):
        for key in ("path", "form", "dtype", "weights_sha256", "config_sha256"):
            rows.append((f"{side} {key}", str(record[side][key])))
        rows.append((f"{side} ran on", ran_on(record["legs"]["float32"][side])))
    rows.append(("settings file", record["settings_file"] or "none"))
    rows += [(f"version of {name}", value) for name, value in record["versions"].items()]
    return [*rows, ("code_sha256", record["code_sha256"])]


def ran_on(settings: dict) -> str:
    """Devices, mesh, attention and float32 products of one side's run, as they were read back."""
    devices = settings.get("devices") or [settings.get("device", "unknown device")]
    parts = [f"{devices.count(d)} x {d}" if devices.count(d) > 1 else d for d in dict.fromkeys(devices)]
    if settings.get("mesh"):
        parts.append("mesh " + ",".join(f"{axis}={size}" for axis, size in settings["mesh"].items()))
    if settings.get("processes", 1) > 1:
        parts.append(f"{settings['processes']} processes")
    if settings.get("attention"):
        parts.append(f"attention {settings['attention']}")
    if settings.get("matmul_precision"):
        parts.append(f"matmul precision {settings['matmul_precision']}")
    if settings.get("float32_products_in_full"):
        parts.append("float32 products in full")
    return ", ".join(parts)


def statistics(name: str, leg: dict, published: float) -> list[str]:
    """A leg's numbers in a line or two."""
    s = {k: float(v) for k, v in leg["statistics"].items() if isinstance(v, (int, float, str))}
    lines = [
        f"{name}: {s['tokens']:.0f} tokens, KL mean {s['kl_mean']:.2e} median {s['kl_median']:.2e} "
        f"p99 {s['kl_p99']:.2e} max {s['kl_max']:.2e} nats, |delta logit| max {s['max_abs_delta_logit']:.2e} "
        f"mean {s['mean_abs_delta_logit']:.2e}, top-1 agreement {s['top1_agreement']:.2%}"
    ]
    lines += also.lines(leg["also"]) if leg.get("also") else []
    if "own_noise" in leg:
        other = leg["against_reference_bfloat16"]["kl_mean"]
        lines.append(
            f"the reference's own bfloat16 noise: KL mean {float(leg['own_noise']['kl_mean']):.2e}; "
            f"reference bfloat16 against candidate bfloat16: {float(other):.2e}; published start line {published:g}"
        )
    if "with_flags_as_found" in leg:
        found = leg["with_flags_as_found"]
        lines.append(
            f"with XLA_FLAGS as found ({found['xla_flags'] or 'none'}), not judged: "
            f"KL mean {float(found['statistics']['kl_mean']):.2e}"
        )
    return lines


def console(record: dict) -> str:
    """The report a tired engineer reads: verdict, what decided, where it broke, what to try, then all numbers."""
    lines = [f"{record['verdict'].upper()}  {record['decided_by']}"]
    decided = decisive(record)
    if decided:
        lines.append(f"  limit {float(decided['limit']):.3g} {decided['unit']}: {decided['reason']}")
    for item in uncovered(record):
        lines.append(f"  not covered: {item['what']} ({item['detail']})")
    lines += [f"  {line}" for line in where(record)]
    lines += [f"  try: {line}" for line in advice(record)]
    lines += ["", *_table(record), ""]
    for name, leg in record["legs"].items():
        first, *more = statistics(name, leg, record["published_kl"])
        lines += [f"  {first}", *(f"    {line}" for line in more)]
        if name in _failed_legs(record):
            for row in leg["statistics"]["by_position"]:
                lines.append(
                    f"    positions {row['positions'][0]} to {row['positions'][1]}: KL mean {float(row['kl_mean']):.2e}, "
                    f"|delta logit| max {float(row['max_abs_delta_logit']):.2e}"
                )
    lines += ["", *(f"  note: {note}" for note in record["notes"])]
    for side in ("reference", "candidate"):
        s = record[side]
        recorded = f", recorded {s['recorded_at']}, replayed from {s['record']}" if s.get("record") else ""
        lines.append(f"  {side}  {s['path']} ({s['dtype']}){recorded}")
        lines.append(f"    on {ran_on(record['legs']['float32'][side])}")
    lines.append(f"  settings   {record['settings_file'] or 'no parity.toml was used'}")
    lines.append(f"  made       {record['created']}, {record['seconds']:.0f} s")
    return "\n".join(lines)


def _table(record: dict) -> list[str]:
    rows = [("", "criterion", "value", "limit", "")]
    for c in record["criteria"]:
        by_hand = " (set by hand)" if c.get("set_by_hand") else ""
        limit = f"{float(c['limit']):.3g} {c['unit']}{by_hand}"
        rows.append((c["leg"], c["name"], _value(c), limit, mark(c)))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _value(criterion: dict) -> str:
    """NaN of a criterion that is off was never measured."""
    value = float(criterion["value"])
    return "-" if math.isnan(value) and not criterion["on"] else f"{value:.3g}"


def _first(lines: list[str], rest: str) -> list[str]:
    more = len(lines) - MOST_NAMED
    return lines if more <= 0 else [*lines[:MOST_NAMED], rest.format(more)]


def _failed_legs(record: dict) -> set[str]:
    return {c["leg"] for c in record["criteria"] if c["on"] and not c["passed"]}
