"""The HTML report of a study: one file, inline SVG, nothing from elsewhere; light and dark by the reader's setting.

Time to first token as a distribution by run; where prompt tokens came from over time; what every stage did in a chosen window.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from forebay.sim.measures import Row
from forebay.sim.stages import Pass
from forebay.sim.study import Finished

WIDTH, HEIGHT = 900, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 34
MAX_CHARTS = 8  # small multiples: more runs than that are in the table only
MAX_PASSES = 6000
CDF_POINTS = 400
TIERS = (
    ("device", "device (L1)"),
    ("host", "host (L2)"),
    ("store", "store (L3)"),
    ("computed", "computed"),
)

STYLE = """
:root { color-scheme: light dark; --ink: #1c1b19; --soft: #6b6a65; --line: #dddbd4; --page: #fcfcfa; --card: #ffffff;
  --c0: #2a78d6; --c1: #d1495b; --c2: #1a9e6f; --c3: #b7791f; --c4: #7b5cd6; --c5: #0f8b9d; --c6: #c2498f; --c7: #5f6b2d;
  --device: #2a78d6; --host: #1a9e6f; --store: #e0a100; --computed: #c9c7bf; --prefill: #2a78d6; --mixed: #7b5cd6; --decode: #1a9e6f;
  --wait: #eceae3; }
@media (prefers-color-scheme: dark) { :root { --ink: #eceae5; --soft: #a3a19a; --line: #3a3936; --page: #181816; --card: #201f1d;
  --c0: #5b9ff0; --c1: #ef7b8a; --c2: #3fc492; --c3: #e0a94a; --c4: #a58df0; --c5: #4ab8c9; --c6: #e07fb5; --c7: #a3b05c;
  --device: #5b9ff0; --host: #3fc492; --store: #e8b93a; --computed: #57554f; --prefill: #5b9ff0; --mixed: #a58df0; --decode: #3fc492;
  --wait: #2d2c29; } }
body { margin: 0 auto; max-width: 960px; padding: 28px 20px 60px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 34px 0 4px; } h3 { font-size: 14px; margin: 16px 0 2px; }
p { color: var(--soft); margin: 2px 0 10px; } figure { margin: 0; overflow-x: auto; }
svg { background: var(--card); border: 1px solid var(--line); border-radius: 6px; max-width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } .grid { stroke: var(--line); }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } th, td { padding: 4px 8px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin: 4px 0 8px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; vertical-align: -1px; }
"""


def html_report(
    title: str, about: str, runs: Sequence[Finished], window: tuple[float, float]
) -> str:
    """The whole document."""
    shown = runs[:MAX_CHARTS]
    rest = (
        f" The first {MAX_CHARTS} of {len(runs)} runs are drawn." if len(runs) > MAX_CHARTS else ""
    )
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(about)}{rest}</p>",
        _table(runs),
        "<h2>Time to first token</h2><p>Share of requests that had their first token by then; logarithmic.</p>",
        _key((f"--c{index}", one.run.name) for index, one in enumerate(shown)),
        _cdf([one.measures.served() for one in shown]),
        "<h2>Where prompt tokens came from</h2><p>By the time at which their request arrived.</p>",
        _key((f"--{tier}", name) for tier, name in TIERS),
        *[f"<h3>{escape(one.run.name)}</h3>{_hits(one)}" for one in shown],
        f"<h2>What the stages did from {window[0]:g} s to {window[1]:g} s</h2>",
        "<p>One row a stage; pale: it had a plan and waited for hidden states. The first replica.</p>",
        _key(
            (
                ("--prefill", "prefill"),
                ("--mixed", "prefill and decodes"),
                ("--decode", "decodes"),
                ("--wait", "waiting"),
            )
        ),
        *[f"<h3>{escape(one.run.name)}</h3>{_gantt(one, window)}" for one in shown],
        "</body></html>",
    ]
    return "\n".join(parts)


def _table(runs: Sequence[Finished]) -> str:
    heads = (
        "run",
        "served",
        "rejected",
        "TTFT mean s",
        "p50",
        "p99",
        "token gap p50 ms",
        "hit %",
        "L1",
        "L2",
        "L3",
        "busy %",
    )
    rows = []
    for one in runs:
        outcome, ttft, hits = one.outcome, one.outcome["ttft_ms"], one.outcome["hit_tokens"]
        prompt = outcome["prompt_tokens"] or 1
        busy = [share for replica in outcome["utilisation"] for share in replica]
        rejected = sum(outcome["rejected"].values())
        cells = (
            one.run.name,
            f"{outcome['requests'] - rejected:,}",
            f"{rejected:,}",
            *(f"{ttft[name] / 1e3:.3f}" if ttft else "-" for name in ("mean", "p50", "p99")),
            f"{outcome['inter_token_ms'].get('p50', math.nan):.1f}",
            *(
                f"{100 * share / prompt:.1f}"
                for share in (
                    prompt - hits["computed"],
                    hits["device"],
                    hits["host"],
                    hits["store"],
                )
            ),
            f"{100 * sum(busy) / len(busy):.1f}",
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<div class='scroll'><table><tr>{head}</tr>{''.join(rows)}</table></div>"


def _key(entries: Iterable[tuple[str, str]]) -> str:
    return (
        "<div class='key'>"
        + "".join(
            f"<span><i style='background:var({c})'></i>{escape(n)}</span>" for c, n in entries
        )
        + "</div>"
    )


def _svg(height: int, body: Iterable[str]) -> str:
    return f"<figure><svg viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'>{''.join(body)}</svg></figure>"


def _linear(low: float, high: float, from_px: float, to_px: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: from_px + (value - low) / span * (to_px - from_px)


def _vertical(x: float, height: int, label: str) -> str:
    bottom = height - BOTTOM
    return (
        f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='{TOP}' y2='{bottom}'/>"
        f"<text x='{x:.1f}' y='{bottom + 18}' text-anchor='middle'>{label}</text>"
    )


def _horizontal(y: float, label: str) -> str:
    return (
        f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
        f"<text x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>"
    )


def _nice_step(span: float, count: int) -> float:
    """1, 2 or 5 times a power of ten, for about ``count`` steps."""
    raw = max(span, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= raw)


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    step = _nice_step(high - low, count)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _cdf(groups: Sequence[Sequence[Row]]) -> str:
    samples = [sorted(max(row.ttft_s, 1e-4) for row in rows) for rows in groups]
    everything = [value for values in samples for value in values]
    if not everything:
        return "<p>No request was served.</p>"
    low, high = math.log10(min(everything)), math.log10(max(everything))
    low, high = (low - 0.05, high + 0.05)
    x = _linear(low, high, LEFT, WIDTH - RIGHT)
    y = _linear(0, 1, HEIGHT - BOTTOM, TOP)
    body = [_horizontal(y(share), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
    for power in range(math.floor(low), math.ceil(high) + 1):
        for digit in (1, 2, 5):
            at = math.log10(digit) + power
            if low <= at <= high:
                body.append(_vertical(x(at), HEIGHT, _seconds(digit * 10.0**power)))
    for index, values in enumerate(samples):
        every = max(len(values) // CDF_POINTS, 1)
        ranks = [*range(0, len(values), every), len(values) - 1] if values else []
        points = " ".join(
            f"{x(math.log10(values[rank])):.1f},{y((rank + 1) / len(values)):.1f}" for rank in ranks
        )
        body.append(
            f"<polyline points='{points}' fill='none' stroke='var(--c{index})' stroke-width='2'/>"
        )
    return _svg(HEIGHT, body)


def _seconds(value: float) -> str:
    return f"{value * 1e3:g} ms" if value < 1 else f"{value:g} s"


def _hits(one: Finished) -> str:
    bins = one.outcome["hits_over_time"]
    if not bins:
        return "<p>No request was served.</p>"
    totals = [sum(entry[tier] for tier, _ in TIERS) for entry in bins]
    width = bins[1]["at_s"] - bins[0]["at_s"] if len(bins) > 1 else 1.0
    end = bins[-1]["at_s"] + width
    x, y = _linear(0, end, LEFT, WIDTH - RIGHT), _linear(0, max(totals), HEIGHT - BOTTOM, TOP)
    body = [_horizontal(y(value), _short(value)) for value in _ticks(0, max(totals), 4)]
    body += [_vertical(x(value), HEIGHT, f"{value:g} s") for value in _ticks(0, end)]
    for entry in bins:
        below = 0.0
        for tier, name in TIERS:
            value = entry[tier]
            top, left, right = (
                y(below + value),
                x(entry["at_s"]),
                x(min(entry["at_s"] + width, end)),
            )
            tip = f"{name}: {value:,} tokens from {entry['at_s']:g} s"
            body.append(
                f"<rect x='{left:.1f}' y='{top:.1f}' width='{max(right - left - 0.6, 0.4):.1f}' height='{y(below) - top:.1f}' "
                f"fill='var(--{tier})'><title>{tip}</title></rect>"
            )
            below += value
    return _svg(HEIGHT, body)


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _gantt(one: Finished, window: tuple[float, float]) -> str:
    rows = {
        stage: passes
        for (replica, stage), passes in sorted(one.measures.passes.items())
        if replica == 0
    }
    if not rows:
        return "<p>No stage had anything to do in this window.</p>"
    height = TOP + 26 * len(rows) + BOTTOM
    x = _linear(*window, LEFT, WIDTH - RIGHT)
    body = [_vertical(x(value), height, f"{value:g} s") for value in _ticks(*window)]
    for index, (stage, passes) in enumerate(rows.items()):
        top = TOP + 26 * index
        body.append(f"<text x='{LEFT - 8}' y='{top + 17}' text-anchor='end'>stage {stage}</text>")
        body += [_bar(x, window, top, each) for each in passes[: MAX_PASSES // len(rows)]]
    return _svg(height, body)


def _bar(x: Callable[[float], float], window: tuple[float, float], top: int, one: Pass) -> str:
    def box(begin: float, end: float, colour: str, tip: str) -> str:
        left, right = x(max(begin, window[0])), x(min(end, window[1]))
        if right <= left:
            return ""
        return (
            f"<rect x='{left:.2f}' y='{top + 3}' width='{max(right - left, 0.3):.2f}' height='20' fill='var({colour})'>"
            f"<title>{tip}</title></rect>"
        )

    kind = (
        "--mixed"
        if one.prefill_tokens and one.decodes
        else "--prefill"
        if one.prefill_tokens
        else "--decode"
    )
    tip = f"plan {one.plan}: {one.prefill_tokens} prefill tokens, {one.decodes} decodes, {1e3 * (one.end - one.start):.1f} ms"
    return box(one.taken, one.start, "--wait", f"plan {one.plan}: waiting") + box(
        one.start, one.end, kind, tip
    )
