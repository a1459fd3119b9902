"""The report: whole, drawn from the document alone, and safe with whatever names are in it."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from forebay.bench.ttft.plots import ticks
from forebay.bench.ttft.report import render

VOID = {"meta", "br", "hr", "img", "input", "link"}
OPTIONAL = {"tr", "td", "th", "li", "html", "body", "head", "p"}


class Checker(HTMLParser):
    """Every element that must be closed is, in order; ``texts`` is what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID | OPTIONAL:
            self.open.append(tag)
        self.outside += [value or "" for name, value in attrs if name in ("src", "href", "data")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID | OPTIONAL:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def document(**changes: Any) -> dict[str, Any]:
    config = {
        "model": "<script>alert(1)</script>", "dtype": "float32", "routes": ["ticket", "staged"], "groups": ["mixed"], "pp": 2, "tp": 1,
        "input_len": 1024, "output_len": 1, "requests": 4, "rounds": 2, "concurrency": 2, "chunk_size": 1024, "fetch_policy": "wait",
    }  # fmt: skip
    samples = [
        {"group": "mixed", "route": route, "is_hit": index % 2 == 0, "ttft_ms": 100.0 + 7 * index}
        for route in ("ticket", "staged")
        for index in range(4)
    ]
    times = {"mean": 123.4, "p50": 120.0, "p90": 130.0, "p99": 140.0}
    span = {
        "process": "rank 0",
        "kind": "forward",
        "start_ms": 5.0,
        "ms": 50.0,
        "id": 3,
        "value": 1024,
        "own": True,
    }
    return {
        "config": config,
        "groups": [{"group": "mixed", "kind": "hit", "route": "ticket", "n": 2, "storage_hits": 2, "ttft_ms": times}],
        "change": [
            {
                "group": "mixed", "kind": "hit", "route": "ticket", "baseline": "staged", "mean_pct": -21.5, "mean_ci": [-30.0, -10.0],
                "p50_pct": -20.0,
            }
        ],
        "valid": True, "problems": [], "rounds_done": 2, "rates_per_s": {}, "samples": samples,
        "timeline": [{"route": "ticket", "group": "mixed", "ttft_ms": 100.0, "spans": [span]}],
    } | changes  # fmt: skip


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    return checker


def test_the_page_is_whole_and_needs_nothing_from_elsewhere() -> None:
    page = render(document())
    checker = checked(page)
    text = " ".join(checker.texts)
    for said in (
        "ticket against staged",
        "-21.5 %",
        "123.4",
        "mixed: hits",
        "mixed: misses",
        "first token, 100.0 ms",
        "forward pass",
    ):
        assert said in text, said
    assert not checker.outside and "url(" not in page and "@import" not in page
    assert "<script" not in page, "names are text"
    assert not re.search(r"\$[a-z]", page), "nothing was left unfilled"


def test_what_makes_a_result_worthless_is_said_first() -> None:
    page = render(
        document(valid=False, problems=["round 1, mixed, ticket, request 0: <b>0</b> tokens came"])
    )
    assert "Not valid: 1 requests" in page and "&lt;b&gt;0" in page
    assert page.index("Not valid") < page.index("What changes")


def test_a_result_of_one_route_or_without_a_timeline_is_drawn_too() -> None:
    samples = [sample for sample in document()["samples"] if sample["route"] == "ticket"]
    page = render(
        document(
            config=document()["config"] | {"routes": ["ticket"]},
            samples=samples,
            change=[],
            timeline=[],
        )
    )
    checked(page)
    assert "What changes" not in page and "seen from inside" not in page


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 1234.5), (-31.7, 5.2), (0.001, 0.0042), (0, 7)]
)
def test_ticks_are_round_inside_the_range_and_neither_few_nor_many(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    step = found[1] - found[0]
    assert f"{step:.0e}"[0] in "125"
