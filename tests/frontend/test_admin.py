"""Routes for operators, the API key, and what the server says when its engine is gone."""

import hashlib
from collections.abc import Callable

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import forebay
from forebay.core.messages import FinishReason, GridState, StoreHealth, Usage
from forebay.settings import Settings
from tests.frontend.fake_planner import FakePlanner
from tests.frontend.served import MODEL, Server, says, until, wait_ready
from tests.frontend.tiny_text import CONTEXT, EOS
from tests.observe.trace_checks import check_trace

Start = Callable[..., Server]


def test_models_version_and_health(server: Server) -> None:
    models = list(server.openai.models.list())
    assert [model.id for model in models] == [MODEL]
    assert server.openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("other/model")
    assert server.http.get("/version").json() == {"version": forebay.__version__}
    assert server.http.get("/health").json() == {
        "state": "ready",
        "detail": "",
        "store": {"state": "none", "detail": "", "openings": 0, "refused": 0, "lost": []},
        "without": [],
    }


def test_a_store_that_is_not_well_is_said_everywhere_and_no_reason_to_be_unhealthy(
    server: Server,
) -> None:
    server.planner.store = StoreHealth("open", "no answer to a get within 4.0 s", 2, 7)
    until(lambda: server.http.get("/health").json()["store"]["state"] == "open")
    health = server.http.get("/health")
    assert health.status_code == 200 and server.http.get("/ready").status_code == 200
    store = health.json()["store"]
    assert store.pop("lost") == []
    assert store == {
        "state": "open",
        "detail": "no answer to a get within 4.0 s",
        "openings": 2,
        "refused": 7,
    }
    assert server.http.get("/cache").json()["store"] == store
    names = {
        "forebay_store_up": 0,
        "forebay_store_openings_total": 2,
        "forebay_store_refused_calls_total": 7,
    }
    assert all(metric(server, name) == value for name, value in names.items())


def test_tokenize_and_detokenize_are_each_others_inverse(server: Server) -> None:
    answer = server.post("/tokenize", prompt="héy").json()
    assert answer == {"count": 4, "max_model_len": CONTEXT, "tokens": list("héy".encode())}
    assert server.post("/detokenize", tokens=[*answer["tokens"], EOS]).json() == {
        "prompt": "héy<end>"
    }
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()
    assert bytes(chat["tokens"]) == b"<user>x\n<assistant>"
    assert server.post("/tokenize").status_code == 400
    error = server.post("/detokenize", tokens=[10**6]).json()["error"]
    assert error["param"] == "tokens" and error["message"].startswith(
        "tokens has the token id 1000000"
    )


def test_cache_and_flush(server: Server) -> None:
    cache = server.http.get("/cache").json()
    assert cache["tiers"]["device"]["capacity"] == 64
    assert cache["hits"] == {
        "prompt_tokens": 40,
        "cached_tokens": {"device": 8, "host": 0, "store": 0},
    }
    for path in ("/cache/flush", "/flush_cache"):
        assert server.http.post(path).json() == {"tiers": ["device", "host"], "freed_pages": 7}
    server.http.post("/cache/flush", json={"tiers": ["device"], "timeout_s": 2.5})
    assert server.planner.flushes[-1].timeout_s == 2.5
    server.planner.busy = ("request a",)
    answer = server.http.post("/cache/flush", json={"timeout_s": 0})
    assert answer.status_code == 409
    assert "request a" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tiers": ["store"]}, "no --store"),
        ({"tiers": ["device", "store"]}, "no --store"),
        ({"tiers": ["l9"]}, "there is no tier"),
        ({"tiers": []}, "empty"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"all": True}, "'all'"),
    ],
)
def test_a_flush_of_what_is_not_there(server: Server, body: dict[str, object], said: str) -> None:
    answer = server.http.post("/cache/flush", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert server.planner.flushes == []


def metric(server: Server, line: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return next(float(text.rsplit(" ", 1)[1]) for text in lines if text.startswith(line + " "))


def test_metrics_count_what_passed(server: Server) -> None:
    names = {
        "forebay_prompt_tokens_total": 2,
        'forebay_cached_tokens_total{tier="device"}': 1,
        'forebay_cached_tokens_total{tier="store"}': 0,
        "forebay_ttft_seconds_count": 1,
        "forebay_inter_token_seconds_count": 5,
        "forebay_queue_seconds_sum": 0.25,
    }
    before = {name: metric(server, name) for name in names}
    server.planner.usage = Usage(cached_device=1, queue_s=0.25)
    server.post("/v1/completions", prompt="ab")
    assert {name: metric(server, name) - before[name] for name in names} == names


def outcomes(server: Server) -> dict[str, float]:
    names = ("stop", "length", "abort", "invalid", "too_long", "full", "error")
    return {name: metric(server, f'forebay_requests_total{{outcome="{name}"}}') for name in names}


def test_a_request_is_counted_once_by_how_it_ended_however_many_choices_it_has(
    server: Server,
) -> None:
    def ends(as_: str, **body: object) -> None:
        before = outcomes(server)
        server.post("/v1/completions", **body)
        after = outcomes(server)
        assert {name for name in after if after[name] != before[name]} == {as_}
        assert after[as_] == before[as_] + 1

    prompts, generated = "forebay_prompt_tokens_total", "forebay_generated_tokens_total"
    before = metric(server, prompts), metric(server, generated)
    ends("stop", prompt="ab", n=3)
    ends("stop", prompt="ab", n=2, stream=True)
    assert (metric(server, prompts), metric(server, generated)) == (before[0] + 4, before[1] + 30)
    ends("length", prompt="ab", n=3, max_tokens=2)
    ends("invalid", prompt="ab", n=99)
    ends("invalid", prompt="ab", model="another")
    ends("too_long", prompt="x" * 5000)
    server.planner.break_after = 2
    ends("error", prompt="ab", n=2)
    server.planner.refuse = (FinishReason.REJECTED_FULL, "full")
    ends("full", prompt="ab", n=2)


def test_a_client_that_leaves_is_counted_as_that(server: Server) -> None:
    server.planner.script = says("hello", end=False)
    server.planner.allow(1)
    before = outcomes(server)["abort"]
    with server.http.stream(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}
    ):
        pass
    until(lambda: outcomes(server)["abort"] == before + 1)


def test_metrics_of_the_planner(server: Server) -> None:
    assert metric(server, "forebay_waiting_requests") == 3
    assert metric(server, 'forebay_pages{state="free",tier="device"}') == 64
    assert metric(server, 'forebay_plan_seconds_bucket{le="0.01"}') == 3
    assert metric(server, "forebay_plan_seconds_count") == 4
    assert metric(server, "forebay_plan_seconds_sum") == 9.5
    assert metric(server, "forebay_worker_restarts_total") == 0


def test_the_timeline_shows_what_requests_waited_for(server: Server) -> None:
    answer = server.post("/v1/completions", prompt="x", n=2)
    assert answer.status_code == 200
    slices = check_trace(server.http.get("/timeline?seconds=5").json())
    assert [event["args"]["tokens"] for event in slices if event["name"] == "request"][-2:] == [
        6,
        6,
    ]
    assert len([event for event in slices if event["name"] == "ttft"]) >= 2
    for wrong in ("0", "-1", "x", "nan", "1e9"):
        refusal = server.http.get(f"/timeline?seconds={wrong}")
        assert refusal.status_code == 400 and "seconds" in refusal.json()["error"]["message"]


METRICS = {
    "forebay_ttft_seconds": {},
    "forebay_inter_token_seconds": {},
    "forebay_queue_seconds": {},
    "forebay_prompt_tokens_total": {},
    "forebay_cached_tokens_total": {"tier": {"device", "host", "store"}},
    "forebay_ticket_total": {
        "outcome": {"issued", "miss", "complete", "short", "joined", "aborted"}
    },
    "forebay_ticket_seconds": {"phase": {"query", "fetch"}},
    "forebay_transfer_bytes_total": {"kind": {"backup", "load", "store", "fetch"}},
    "forebay_transfer_seconds": {"kind": {"backup", "load", "store", "fetch"}},
    "forebay_pages": {"tier": {"device", "host"}, "state": {"free", "cached", "private", "held"}},
    "forebay_fetch_unused_tokens_total": {"reason": {"failed", "covered", "timeout"}},
    "forebay_store_ops_total": {"op": {"match", "get", "put"}, "outcome": {"ok"}},
    "forebay_promotion_total": {"trigger": {"hit", "prefetch"}, "outcome": {"done", "failed"}},
    "forebay_throttle_total": {"state": {"delegated", "already_resident", "failed"}},
    "forebay_worker_restarts_total": {},
    "forebay_plan_seconds": {},
    "forebay_running_requests": {},
    "forebay_requests_total": {"outcome": {"stop", "length", "abort", "invalid", "error"}},
    "forebay_generated_tokens_total": {},
    "forebay_waiting_requests": {},
}


@pytest.mark.parametrize("name", METRICS)
def test_every_promised_metric_is_there_before_anything_was_counted(
    server: Server, name: str
) -> None:
    until(lambda: "forebay_plan_seconds" in server.http.get("/metrics").text)
    found = [
        sample
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if sample.name in (name, f"{name}_count")
    ]
    assert found
    for label, values in METRICS[name].items():
        assert values <= {sample.labels[label] for sample in found}
    assert all(set(sample.labels) == set(METRICS[name]) for sample in found)


def test_with_a_key_everything_but_the_probes_asks_for_it(start_server: Start) -> None:
    key = hashlib.sha256(b"any").hexdigest()
    server = wait_ready(start_server(Settings(api_key=key)))
    assert server.http.get("/health").status_code == 200
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": key},
        {"Authorization": f"Bearer {key}x"},
    ):
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("POST", "/flush_cache"),
            ("GET", "/nowhere"),
        ):
            answer = server.http.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert (
        server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    )
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    assert client.completions.create(model=MODEL, prompt="x").choices[0].text == "hello"


def test_while_the_model_loads_health_says_so_and_requests_are_told_to_come_back(
    start_server: Start,
) -> None:
    planner = FakePlanner(says("hello"), CONTEXT)
    planner.state = GridState.STARTING
    planner.detail = "loading weights"
    server = start_server(planner=planner)
    until(lambda: server.http.get("/health").status_code == 200)
    health = server.http.get("/health").json()
    assert (health["state"], health["detail"]) == ("starting", "loading weights")
    assert server.http.get("/ready").status_code == 503
    answer = server.post("/v1/completions", prompt="x")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "loaded" in answer.json()["error"]["message"]
    planner.state = GridState.READY
    until(lambda: server.http.get("/ready").status_code == 200)
    assert server.post("/v1/completions", prompt="x").status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(
    start_server: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    planner = FakePlanner(says("hello"), CONTEXT)
    planner.state, planner.detail = GridState.FAILED, "rank 0: model.safetensors is damaged"
    server = start_server(planner=planner)
    assert server.wait_end() == 2
    assert "forebay: rank 0: model.safetensors is damaged\n" in capsys.readouterr().err


def test_the_planners_death_ends_streams_with_an_error_and_the_server_with_a_line(
    start_server: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server = wait_ready(start_server())
    server.planner.script = says("on and on ", end=False)
    server.planner.allow(1)
    stream = server.openai.completions.create(model=MODEL, prompt="x", stream=True)
    assert next(stream).choices[0].text == "o"
    server.planner.kill()
    with pytest.raises(openai.APIError, match="the planner process ended with status -9"):
        list(stream)
    assert server.wait_end() == 1
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "forebay: the planner process ended with status -9"
    )


def test_a_planner_that_falls_silent_is_unhealthy_and_then_given_up(
    start_server: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server = wait_ready(start_server())
    server.planner.mute = True
    until(lambda: server.http.get("/health").status_code == 503)
    assert server.http.get("/health").json()["state"] == "silent"
    assert server.wait_end() == 1
    assert "the planner has not been heard for 5 s" in capsys.readouterr().err
