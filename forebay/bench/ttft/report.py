"""The result document as one HTML page that needs nothing else: changes, distributions, one hit as a timeline, and the numbers."""

from collections.abc import Sequence
from html import escape
from string import Template
from typing import Any

from forebay.bench.ttft.plots import Bar, Interval, distribution, forest, gantt

# Which row of its process a span is drawn in, by where it is recorded. What is not here is not drawn.
_TRACKS = {
    "request": ("queue", "prefill"),
    "ticket": ("query", "ticket"),
    "compute": ("apply", "receive", "forward", "sample"),
    "copies": ("load", "backup"),
    "store": ("staged", "fetch", "store"),
}
_ONLY_OWN = ("request", "ticket")
_SPAN_TEXTS = {
    "queue": "waits to be admitted",
    "prefill": "admitted, until its first token",
    "query": "the store is asked",
    "ticket": "fetch, from the order to the last rank's word",
    "apply": "plan taken",
    "receive": "waiting for the stage before",
    "forward": "forward pass",
    "sample": "choosing tokens",
    "load": "host to device, by layer",
    "backup": "device to host",
    "staged": "word of a fetch waits for the compute loop",
    "fetch": "store to host",
    "store": "host to store",
}


def render(result: dict[str, Any]) -> str:
    """The page. ``result``: the document of `bench ttft`."""
    about = result["config"]
    routes = about["routes"]
    return _PAGE.substitute(
        title=f"Time to first token: {' against '.join(map(_h, routes))}",
        load=_load(result),
        verdict=_verdict(result),
        legend=_legend(routes),
        changes=_changes(result["change"], routes),
        distributions="\n".join(
            _group(group, result["samples"], routes) for group in about["groups"]
        ),
        timeline=_timelines(result["timeline"], routes),
        numbers=_numbers(result["groups"], routes),
        spans=_span_colours(),
        config="".join(f"<tr><td>{_h(name)}<td>{_h(value)}" for name, value in about.items()),
    )


def _h(value: Any) -> str:
    return escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _load(result: dict[str, Any]) -> str:
    about = result["config"]
    load = f"{about['concurrency']} requests in flight"
    if result["rates_per_s"]:
        load = "requests at random times, " + ", ".join(
            f"{group} {rate:.2f}/s" for group, rate in result["rates_per_s"].items()
        )
    return (
        f"{_h(about['model'])}, {_h(about['dtype'])}, {about['pp']} stages x {about['tp']} ranks; {about['input_len']} tokens in, "
        f"{about['output_len']} out, in chunks of {about['chunk_size']}; {_h(load)}; fetch policy {_h(about['fetch_policy'])}; "
        f"{about['requests']} requests of each group and route in {result['rounds_done']} of {about['rounds']} interleaved rounds"
    )


def _verdict(result: dict[str, Any]) -> str:
    if result["valid"]:
        return '<p class="good">Valid: every request hit or missed as intended, and every hit gave the text that was computed.</p>'
    problems = "".join(f"<li>{_h(problem)}" for problem in result["problems"])
    return f'<div class="bad">Not valid: {len(result["problems"])} requests were not as intended.<ul>{problems}</ul></div>'


def _legend(routes: Sequence[str]) -> str:
    return "".join(
        f'<span class="key"><i class="swatch r{number}"></i>{_h(route)}</span>'
        for number, route in enumerate(routes)
    )


def _changes(changes: Sequence[dict[str, Any]], routes: Sequence[str]) -> str:
    """Groups of one kind are told once."""
    rows = []
    for entry in changes:
        if entry["kind"] != entry["group"]:
            words = (
                entry["group"] if entry["group"] != "mixed" else f"mixed, {_kind(entry['kind'])}"
            )
            label = words + (f", {entry['route']}" if len(routes) > 2 else "")
            rows.append(
                Interval(label, routes.index(entry["route"]), entry["mean_pct"], *entry["mean_ci"])
            )
    if not rows:
        return ""
    drawing = forest(rows, "change of the mean time to first token with 95 % intervals")
    text = f"Mean time to first token against {_h(changes[0]['baseline'])}, with 95 % bootstrap intervals; left of the line is sooner."
    return f'<section><h2>What changes</h2><p>{text}</p><div class="wide">{drawing}</div></section>'


def _group(group: str, samples: Sequence[dict[str, Any]], routes: Sequence[str]) -> str:
    mine = [sample for sample in samples if sample["group"] == group]
    figures = []
    for kind, is_hit in (("hit", True), ("miss", False)):
        values = {
            route: [
                sample["ttft_ms"]
                for sample in mine
                if sample["route"] == route and sample["is_hit"] == is_hit
            ]
            for route in routes
        }
        if all(values.values()):
            drawing = distribution(values, f"time to first token, group {group}, {kind}")
            figures.append(
                f"<figure><figcaption>{_h(group)}: {_kind(kind)}</figcaption>{drawing}</figure>"
            )
    return "".join(figures)


def _kind(kind: str) -> str:
    return {"hit": "hits", "miss": "misses", "all": "all"}[kind]


def _timelines(timelines: Sequence[dict[str, Any]], routes: Sequence[str]) -> str:
    """Each route's median hit, all on the same scale."""
    end = max((entry["ttft_ms"] for entry in timelines), default=0) * 1.05
    begin = -0.04 * end
    figures, kinds = [], dict[str, None]()
    for entry in timelines:
        bars = [bar for span in entry["spans"] if (bar := _bar(span, begin, end)) is not None]
        kinds |= dict.fromkeys(bar.kind for bar in bars)
        if bars:
            bars.sort(
                key=lambda bar: (bar.lane.startswith("rank"), bar.lane, not bar.faded)
            )  # the planner first; own spans on top
            marks = {"sent": 0.0, f"first token, {entry['ttft_ms']:.1f} ms": entry["ttft_ms"]}
            drawing = gantt(bars, tuple(_TRACKS), begin, end, marks, f"one hit by {entry['route']}")
            swatch = f'<i class="swatch r{routes.index(entry["route"])}"></i>'
            caption = (
                f"<figcaption>{swatch}{_h(entry['route'])}, group {_h(entry['group'])}</figcaption>"
            )
            figures.append(
                f'<figure class="full">{caption}<div class="wide">{drawing}</div></figure>'
            )
    if not figures:
        return ""
    known = [kind for kind in _SPAN_TEXTS if kind in kinds]
    keys = "".join(
        f'<span class="key"><i class="swatch k-{kind}"></i>{kind}: {_h(_SPAN_TEXTS[kind])}</span>'
        for kind in known
    )
    text = "What every process did during the hit of median time in the last round. Faded: for other requests that ran meanwhile."
    return f'<section><h2>One hit, seen from inside</h2><p>{text}</p><p class="keys">{keys}</p>{"".join(figures)}</section>'


def _bar(span: dict[str, Any], begin: float, end: float) -> Bar | None:
    """None for what is not drawn."""
    track = next((name for name, kinds in _TRACKS.items() if span["kind"] in kinds), None)
    start, stop = max(span["start_ms"], begin), min(span["start_ms"] + span["ms"], end)
    if track is None or stop <= start or (track in _ONLY_OWN and not span["own"]):
        return None
    title = f"{span['kind']} {span['id']}: {span['ms']:.2f} ms from {span['start_ms']:.2f} ms ({span['value']})"
    return Bar(
        span["process"], track, span["kind"], start, stop - start, title, faded=not span["own"]
    )


def _numbers(groups: Sequence[dict[str, Any]], routes: Sequence[str]) -> str:
    rows = []
    for entry in groups:
        times = "".join(
            f"<td>{entry['ttft_ms'][name]:.1f}" for name in ("mean", "p50", "p90", "p99")
        )
        swatch = f'<i class="swatch r{routes.index(entry["route"])}"></i>'
        words = (
            f"<td>{_h(entry['group'])}<td>{_kind(entry['kind'])}<td>{swatch}{_h(entry['route'])}"
        )
        rows.append(f"<tr>{words}<td>{entry['n']}<td>{entry['storage_hits']}{times}")
    return "".join(rows)


def _span_colours() -> str:
    """Kinds that mean the same on other tracks share a colour."""
    shared = {"staged": "ticket", "apply": "plan", "sample": "plan"}
    names = {kind: shared.get(kind, kind) for kind in _SPAN_TEXTS}
    rules = (
        f"rect.k-{kind} {{ fill: var(--{name}); }} i.k-{kind} {{ background: var(--{name}); }}"
        for kind, name in names.items()
    )
    return "\n".join(rules) + "\n.faded { opacity: 0.28; }"


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --page: #f7f7f5; --card: #ffffff; --text: #1d2126; --quiet: #69707a; --line: #e2e3e1; --good: #1a7f4b; --bad: #b3261e;
  --r0: #1f6feb; --r1: #d9730d; --r2: #8250df; --r3: #57606a;
  --forward: #7d8b99; --receive: #d9dde1; --plan: #b4a7d6; --load: #17a2a2; --backup: #b08968; --fetch: #2da44e; --store: #9a8c2c;
  --ticket: #bf3989; --query: #e16f9f; --queue: #c9a400; --prefill: #57606a; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1c2024; --text: #e6e8ea; --quiet: #98a1ab; --line: #31363c;
  --good: #56d391; --bad: #ff8a80; --r0: #6cb0ff; --r1: #ffa657; --r2: #c297ff; --r3: #a0a8b0;
  --forward: #8796a5; --receive: #363d45; --plan: #8f80c0; --load: #35c4c4; --backup: #c9a27e; --fetch: #4ac26b; --store: #c2b24a;
  --ticket: #f778ba; --query: #ff9bce; --queue: #e3c341; --prefill: #b1bac4; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 32px 24px 64px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 0 0 12px; } .quiet, section > p { color: var(--quiet); }
.good { color: var(--good); } .bad { color: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin: 18px 0; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 18px 24px; }
figure { margin: 0; } figure.full { margin-top: 16px; } figcaption { font-weight: 600; margin-bottom: 4px; }
.wide { overflow-x: auto; } svg { display: block; width: 100%; height: auto; } .wide svg { min-width: 640px; }
.key { display: inline-flex; align-items: center; margin: 0 16px 4px 0; color: var(--text); } .keys { font-size: 13px; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; } th { color: var(--quiet); font-weight: 500; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:nth-child(-n+3), td:nth-child(-n+3), .config td { text-align: left; } .config td { white-space: normal; }
details { color: var(--quiet); } summary { cursor: pointer; }
text { fill: var(--text); font-size: 12px; } .tick { fill: var(--quiet); font-size: 11px; } .strong { font-weight: 600; }
.value { font-weight: 600; font-variant-numeric: tabular-nums; } .tick.strong { fill: var(--text); }
.grid, .lane { stroke: var(--line); stroke-width: 1; } .zero { stroke: var(--quiet); }
.mark { stroke: var(--text); stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 2.2; } .whisker { stroke-width: 2.4; stroke-linecap: round; } .median { stroke-width: 2.4; }
.sample { opacity: 0.45; } .box { fill-opacity: 0.16; stroke-opacity: 0.5; } .mean { stroke: var(--card); stroke-width: 1; }
.line.r0, .whisker.r0, .median.r0, .box.r0 { stroke: var(--r0); } .dot.r0, .sample.r0, .box.r0, .mean.r0 { fill: var(--r0); }
.line.r1, .whisker.r1, .median.r1, .box.r1 { stroke: var(--r1); } .dot.r1, .sample.r1, .box.r1, .mean.r1 { fill: var(--r1); }
.line.r2, .whisker.r2, .median.r2, .box.r2 { stroke: var(--r2); } .dot.r2, .sample.r2, .box.r2, .mean.r2 { fill: var(--r2); }
.line.r3, .whisker.r3, .median.r3, .box.r3 { stroke: var(--r3); } .dot.r3, .sample.r3, .box.r3, .mean.r3 { fill: var(--r3); }
.swatch.r0 { background: var(--r0); } .swatch.r1 { background: var(--r1); } .swatch.r2 { background: var(--r2); }
.swatch.r3 { background: var(--r3); }
$spans
</style>
</head>
<body>
<h1>$title</h1>
<p class="quiet">$load</p>
$verdict
<p>$legend</p>
$changes
<section><h2>How the times are spread</h2><p>The share of requests that had their first token within a time; below, every request as a
dot, the middle half as a box, the median as a line, the mean as a diamond.</p><div class="grid2">
$distributions
</div></section>
$timeline
<section><h2>The numbers</h2><p>Milliseconds until the first token reached the client.</p><div class="wide"><table>
<tr><th>group<th>kind<th>route<th>n<th>hits<th>mean<th>p50<th>p90<th>p99
$numbers
</table></div></section>
<section><details><summary>Configuration</summary><table class="config">$config</table></details></section>
</body>
</html>
""")
