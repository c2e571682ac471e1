"""The plots of the HTML report: matplotlib figures as inline SVG whose colours are the page's own."""

from __future__ import annotations

import importlib.util
import io
import math
import re

from ..olmo_jax.errors import BadInput

# Colours stand in the SVG as these values and are replaced by the page's variables, so that one file serves light and dark.
INK, MUTED, GRID, CANDIDATE, REFERENCE, LIMIT = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
VARIABLES = dict(
    zip((INK, MUTED, GRID, CANDIDATE, REFERENCE, LIMIT), ("ink", "muted", "grid", "candidate", "reference", "limit"), strict=True)
)  # fmt: skip
SIZE = (5.6, 3.3)  # inches; the page scales it
SMALLEST = 1e-20  # a KL of exactly 0 is drawn here on a logarithmic axis
CRITERIA = {  # which criterion's limit belongs to the distribution of which statistic
    ("float32", "kl"):                "max KL",
    ("float32", "delta_over_spread"): "max |delta logit| / spread",
    ("bfloat16", "kl"):               "mean KL",
}  # fmt: skip


def require_matplotlib() -> None:
    """Raise BadInput with what to install, before any work is done."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput("--html draws its plots with matplotlib, which is not here: pip install 'olmo-parity[html]'")


def plots(record: dict) -> list[tuple[str, str]]:
    """(svg, caption) of every plot that the record has numbers for."""
    found = []
    for leg in record["legs"]:
        found.append(_by_position(record, leg))
    for leg, statistic in CRITERIA:
        if statistic in record["legs"].get(leg, {}).get("statistics", {}).get("distribution", {}):
            found.append(_distribution(record, leg, statistic))
    if record.get("trace") and record["trace"].get("modules"):
        found.append(_by_layer(record["trace"]))
    return found


def _by_position(record: dict, leg: str) -> tuple[str, str]:
    figure, axes = _axes(f"{leg}: mean KL by position", "position in the sequence, tokens", "KL, nats per token")
    lines = [("candidate", CANDIDATE, "-", record["legs"][leg]["statistics"])]
    if "own_noise" in record["legs"][leg]:
        lines.append(("reference's own bfloat16", REFERENCE, "--", record["legs"][leg]["own_noise"]))
    for label, colour, style, statistics in lines:
        rows = statistics["by_position"]
        edges = [row["positions"][0] for row in rows] + [rows[-1]["positions"][1] + 1]
        means = [_drawable(row["kl_mean"]) for row in rows]
        axes.step(edges, [*means, means[-1]], where="post", color=colour, linestyle=style, linewidth=2, label=label)
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xlim(0, edges[-1])
    axes.set_xticks(edges[:-1], [str(e) for e in edges[:-1]])
    axes.minorticks_off()
    _log(axes, "y")
    criterion = _criterion(record, leg, CRITERIA[leg, "kl"])
    if criterion:
        _limit(axes, "h", criterion)
    _legend(axes)
    return _svg(figure, f"{leg}-position"), (
        f"{leg}: mean KL(reference ‖ candidate) by position. A rise with position points at rotary, window or mask; "
        "position 0 sees one key and shows none of these."
    )


def _distribution(record: dict, leg: str, statistic: str) -> tuple[str, str]:
    what = {"kl": "KL, nats", "delta_over_spread": "largest |delta logit|, share of the logits' spread"}[statistic]
    figure, axes = _axes(f"{leg}: {what.split(',')[0]} of every token", what, "tokens")
    # Log counts: the few tokens that decide are as visible as the many that do not.
    sides = [("candidate", CANDIDATE, record["legs"][leg]["statistics"]["distribution"][statistic], True)]
    if "distribution" in record["legs"][leg].get("own_noise", {}):
        own = record["legs"][leg]["own_noise"]["distribution"][statistic]
        sides.append(("reference's own bfloat16", REFERENCE, own, False))
    apart = []
    for label, colour, histogram, filled in sides:
        per_decade = histogram["bins_per_decade"]
        edges = [10 ** ((histogram["first"] + i) / per_decade) for i in range(len(histogram["counts"]) + 1)]
        if histogram["counts"]:
            axes.stairs(
                histogram["counts"], edges, fill=filled, color=colour, linewidth=2, alpha=0.85 if filled else 1, label=label
            )  # fmt: skip
        apart += [f"{label}: {histogram[k]} tokens {k}" for k in ("zero", "nonfinite") if histogram[k]]
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(axis="y", which="minor", left=False)
    _log(axes, "x")
    criterion = _criterion(record, leg, CRITERIA[leg, statistic])
    if criterion:
        _limit(axes, "v", criterion)
    _legend(axes)
    more = f" Not drawn: {', '.join(apart)}." if apart else ""
    per_token = (
        " The limit is one of the mean, so single tokens may pass it." if leg == "bfloat16" else " The limit is one of every token."
    )  # fmt: skip
    return _svg(figure, f"{leg}-{statistic}"), f"{leg}: {what}, over tokens; the count is logarithmic.{per_token}{more}"


def _by_layer(trace: dict) -> tuple[str, str]:
    modules = trace["modules"]
    figure, axes = _axes("error by module", "module, in the order of the forward pass", "relative error")
    forced = [m for m in modules if m["inputs"] != "its own"]
    if forced:
        _error(axes, [m if m in forced else None for m in modules], CANDIDATE, "given the reference's inputs")
    _error(axes, [m["carried"] for m in modules], REFERENCE, "errors carried along")
    step = max(1, len(modules) // 8)
    axes.set_xticks(
        range(0, len(modules), step), [m["name"] for m in modules[::step]], rotation=30, ha="right", fontsize=8
    )
    _log(axes, "y")
    first = trace.get("first_divergence")
    names = [m["name"] for m in modules]
    if first in names:
        axes.axvline(names.index(first), color=LIMIT, linewidth=1.5)
    _legend(axes)
    return _svg(figure, "layers"), "Error by module" + (
        f": {first} is the first outside its envelope (dashed)." if first else "; envelopes are dashed."
    )


def _error(axes, modules: list[dict | None], colour: str, label: str) -> None:
    """One kind of error, and the envelope it must stay in."""
    for key, style in (("error", {"marker": "o", "markersize": 3, "label": label}), ("limit", {"linestyle": "--"})):
        values = [_drawable(m[key]) if m else math.nan for m in modules]
        axes.plot(values, color=colour, linewidth=1.5, **style)


def _axes(title: str, x: str, y: str):
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.set_title(title, color=INK, fontsize=11, loc="left")
    axes.set_xlabel(x, color=MUTED, fontsize=10)
    axes.set_ylabel(y, color=MUTED, fontsize=10)
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.grid(axis="both", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    return figure, axes


def _log(axes, axis: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
    one = axes.xaxis if axis == "x" else axes.yaxis
    one.set_major_locator(LogLocator(numticks=7))
    one.set_minor_locator(NullLocator())
    one.set_major_formatter(lambda value, _: f"1e{round(math.log10(value))}" if value > 0 else "0")


def _limit(axes, direction: str, criterion: dict) -> None:
    value = float(criterion["limit"])
    if value > 0:
        line = axes.axhline if direction == "h" else axes.axvline
        line(value, color=LIMIT, linestyle=":", linewidth=2, label=f"limit of {criterion['name']}: {value:.3g}")


def _legend(axes) -> None:
    # Below the axes: inside, it would cover the tail that decides.
    axes.figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=9, labelcolor=INK)


def _criterion(record: dict, leg: str, name: str) -> dict | None:
    return next((c for c in record["criteria"] if (c["leg"], c["name"]) == (leg, name)), None)


def _drawable(value) -> float:
    return max(float(value), SMALLEST) if math.isfinite(float(value)) else math.nan


def _svg(figure, name: str) -> str:
    """Inline SVG: deterministic, text as text, ids of its own, colours by variable."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    svg = re.sub(r'\bid="(?!m|p[0-9a-f]{10})', f'id="{name}-', svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg
