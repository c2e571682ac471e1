"""A trace for people: the first divergence, what is wrong there, what to try, and a row for every layer."""

from __future__ import annotations

from itertools import groupby

MOST_NAMED = 12
# What to try, by how a module's name ends.
ADVICE = {
    "embed_tokens": "compare the embedding row by row (olmo-convert verify); is the vocabulary padded, or another tokenizer's?",
    "proj": "look at the weight's layout and source: olmo-convert verify SOURCE TARGET compares every bit of it",
    "norm": "look at epsilon, at float32 inside the norm, and at the order of scaling and casting",
    "rotary": "look at theta, YaRN, attention factor and positions of this layer type: olmo-convert inspect prints what is right",
    "mix": "look at the mask, the window, the score scale and which kv head a query head reads",
    "swiglu": "look at the activation function, and at which of gate and up is activated",
    "residual": "look at what is added, and where the norm stands: OLMo 3 normalises after attention and after the MLP",
    "lm_head": "look at the head's layout, and whether embedding and head are tied",
}


def console(record: dict) -> str:
    """The report of olmo-parity trace."""
    trace = record["trace"]
    lines = [f"{record['verdict'].upper()}  {headline(trace)}"]
    lines += [f"  {line}" for line in details(trace)]
    lines += [f"  {note}" for note in record["notes"]]
    lines += [f"  try: {line}" for line in advice(trace)]
    lines += ["", *_table(trace), ""]
    lines.append(f"  reference  {record['reference']}")
    lines.append(f"  candidate  {record['candidate']}")
    changed = ", ".join(f"{k}={v}" for k, v in record["overrides"].items())
    lines += [f"  changed on both sides: {changed}"] if changed else []
    lines.append(f"  traced {', '.join(trace['sequences'])} in {trace['dtype']}")
    lines.append(f"  made       {record['created']}, {record['seconds']:.0f} s")
    return "\n".join(lines)


def headline(trace: dict) -> str:
    """The verdict in a sentence."""
    first = _module(trace, trace["first_divergence"])
    if first is None:
        return f"all {len(trace['modules'])} modules stay inside their envelopes"
    judged = first if first["left"] else first["carried"]
    how = (
        "given the reference's own inputs"
        if first["left"] and first["inputs"] != "its own"
        else "with errors carried along"
    )
    return (
        f"{first['name']} is the first module outside its envelope: relative error {float(judged['error']):.3g}, limit "
        f"{float(judged['limit']):.3g}, {how}"
    )


def details(trace: dict) -> list[str]:
    """Where it broke; empty where nothing did."""
    first = _module(trace, trace["first_divergence"])
    if first is None:
        return []
    lines = [f"weights of it: {', '.join(first['weights'])}"] if first["weights"] else []
    alone = [m for m in trace["modules"] if m["left"] and m["inputs"] != "its own"]
    if alone:
        lines.append(f"wrong by themselves, given the reference's inputs: {_names([m['name'] for m in alone])}")
    elif first["inputs"] != "its own":
        lines.append("no module is wrong by itself: the errors of many add up to more than noise does")
    for sentence, names in because(trace):
        lines.append(f"certain: {_names(names)} {sentence}")
    return lines


def advice(trace: dict) -> list[str]:
    """What to try, by the first module."""
    first = trace["first_divergence"]
    return [text for end, text in ADVICE.items() if first and first.endswith(end)]


def because(trace: dict) -> list[tuple[str, list[str]]]:
    """What is known for certain, each sentence once, with the modules it is true of."""
    found: dict[str, list[str]] = {}
    for module in trace["modules"]:
        for sentence in module["because"]:
            found.setdefault(sentence, []).append(module["name"])
    return list(found.items())


def _names(names: list[str]) -> str:
    """Module names, those of several layers together: layers.{0-2,4}.self_attn.mix."""
    kinds: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        if parts[0] == "layers":
            kinds.setdefault(".".join(parts[2:]), []).append(int(parts[1]))
        else:
            kinds.setdefault(name, [])
    said = [f"layers.{_ranges(layers)}.{kind}" if layers else kind for kind, layers in kinds.items()]
    more = len(said) - MOST_NAMED
    return ", ".join(said[:MOST_NAMED]) + (f" and {more} more kinds" if more > 0 else "")


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 4] as {0-2,4}."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    said = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return said[0] if len(numbers) == 1 else "{" + ",".join(said) + "}"


def _table(trace: dict) -> list[str]:
    """A row a layer: what it gives with errors carried along, and its worst module given the reference's inputs."""
    rows = [("", "carried error", "limit", "worst module by itself", "error", "limit", "")]
    for where, group in groupby(trace["modules"], lambda m: m["layer"] if m["layer"] is not None else m["name"]):
        modules = list(group)
        last = modules[-1]["carried"]
        alone = [m for m in modules if m["inputs"] != "its own"]
        worst = max(alone, key=_excess) if alone else None
        own = ("", "", "")
        if worst:
            name = worst["name"].removeprefix(f"layers.{where}.")
            own = (name, f"{float(worst['error']):.2e}", f"{float(worst['limit']):.2e}")
        mark = "OUT" if worst and worst["left"] else ("out, carried" if last["left"] else "ok")
        label = f"layer {where}" if isinstance(where, int) else where
        rows.append((label, f"{float(last['error']):.2e}", f"{float(last['limit']):.2e}", *own, mark))
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _excess(module: dict) -> float:
    error, limit = float(module["error"]), float(module["limit"])
    return error / limit if error == error else float("inf")


def _module(trace: dict, name: str | None) -> dict | None:
    return next((m for m in trace["modules"] if m["name"] == name), None)
