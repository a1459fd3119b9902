"""Flight records drawn as one trace."""

import json
from pathlib import Path

import msgspec
import pytest

from forebay.cli.main import run
from forebay.core.spans import SpanKind
from forebay.observe.events import FlightRecord, Rings
from forebay.observe.flight import save_timeline
from forebay.observe.timeline import chrome_trace
from tests.observe.trace_checks import check_trace

US = 1000


def filled_rings() -> Rings:
    """One ticket over two ranks and one plan over two stages; two requests queue at once."""
    rings = Rings.create(["frontend", "planner", "rank 0", "rank 1"])
    rings.close()
    planner, first, second = (rings.rings[name] for name in ("planner", "rank 0", "rank 1"))
    planner.record(SpanKind.QUEUE, 0, request=1, end_ns=90 * US)
    planner.record(SpanKind.QUEUE, 10 * US, request=2, end_ns=100 * US)
    planner.record(SpanKind.TICKET, 20 * US, id=5, value=3, request=1, end_ns=80 * US)
    for rank in (first, second):
        rank.record(SpanKind.FETCH, 30 * US, id=5, value=3, end_ns=70 * US)
    first.record(SpanKind.LOAD_WAIT, 105 * US, id=9, part=1, end_ns=110 * US)
    first.record(SpanKind.FORWARD, 100 * US, id=9, value=64, part=0, end_ns=140 * US)
    second.record(SpanKind.RECEIVE, 100 * US, id=9, value=64, end_ns=141 * US)
    second.record(SpanKind.FORWARD, 141 * US, id=9, value=64, part=1, end_ns=170 * US)
    return rings


def test_all_processes_are_on_one_axis_and_arrows_lead_through_them() -> None:
    trace = chrome_trace([filled_rings().flight_record("test")])
    slices = check_trace(trace)
    assert [
        (event["name"], event["ts"], event["dur"]) for event in slices if event["name"] == "ticket"
    ] == [("ticket", 20.0, 60.0)]
    queues = [event for event in slices if event["name"] == "queue"]
    assert len({event["tid"] for event in queues}) == 2, "what overlaps is on lanes of its own"
    waits = {
        event["name"]: event["tid"] for event in slices if event["name"] in ("load-wait", "forward")
    }
    assert waits["load-wait"] == waits["forward"], "a wait is drawn inside its forward pass"
    arrows = [event["name"] for event in trace["traceEvents"] if event["ph"] == "s"]
    assert sorted(arrows) == ["activations", "ticket", "ticket"]
    (request,) = {event["args"]["request"] for event in slices if event["name"] == "ticket"}
    assert request == f"{1:016x}"


def test_spans_that_two_records_hold_are_drawn_once() -> None:
    rings = filled_rings()
    one, both = rings.flight_record("a"), [rings.flight_record("a"), rings.flight_record("b")]
    assert len(check_trace(chrome_trace(both))) == len(check_trace(chrome_trace([one])))


def test_records_of_two_machines_meet_on_the_wall_clock() -> None:
    """The second machine's monotonic clock is 1 s ahead of the first's."""
    here = filled_rings().flight_record("here")
    there: FlightRecord = msgspec.structs.replace(
        here, boot_id="another", monotonic_ns=here.monotonic_ns + 10**9
    )
    slices = check_trace(chrome_trace([here, there]))
    tickets = sorted(event["ts"] for event in slices if event["name"] == "ticket")
    assert tickets[1] - tickets[0] == pytest.approx(10**6)


def test_nothing_recorded_is_an_empty_trace() -> None:
    rings = Rings.create(["planner"])
    rings.close()
    assert check_trace(chrome_trace([rings.flight_record("test")])) == []


def test_the_command_merges_files_and_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_timeline(filled_rings(), tmp_path / "records", "the end")
    output = tmp_path / "trace.json"
    assert run(["timeline", str(tmp_path / "records"), "-o", str(output), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["output"] == str(output) and said["spans"]["fetch"] == 2
    assert len(check_trace(json.loads(output.read_text()))) == sum(said["spans"].values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{tmp}/nowhere.flight"], "No such file"),
        (["{tmp}"], "holds no flight record"),
        (["{tmp}/text"], "is not a flight record"),
        (["{tmp}/trace"], "a trace already"),
        (["{tmp}/good", "-o", "{tmp}/no/such/place.json"], "cannot be written"),
        ([], "FILE"),
    ],
)
def test_what_cannot_be_merged_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "trace").write_text('{"traceEvents": []}')
    save_timeline(filled_rings(), tmp_path / "elsewhere", "x").rename(tmp_path / "good")
    assert run(["timeline", *(argument.format(tmp=tmp_path) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
