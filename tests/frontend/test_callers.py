"""What depends on who asks: several keys, the operator's key, bounds on priority, whose cached prefixes are shared; and names."""

from collections.abc import Callable, Iterator

import pytest

from forebay.core.messages import Submit
from forebay.settings import Settings, SettingsError, resolve
from tests.frontend.served import Server, says, wait_ready

Start = Callable[..., Server]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def post(server: Server, headers: dict[str, str], model: str = "tiny", **more: object) -> int:
    body = {"model": model, "prompt": "x", **more}
    return server.http.post("/v1/completions", json=body, headers=headers).status_code


def last(server: Server) -> Submit:
    return server.planner.submits[-1]


@pytest.fixture(scope="module")
def operated(start_server: Start) -> Server:
    return wait_ready(start_server(Settings(api_key="k1, k2", admin_key="boss", store="none")))


@pytest.fixture(autouse=True)
def fresh(operated: Server) -> Iterator[None]:
    operated.planner.reset(says("hello"))
    yield


def test_any_of_several_keys_is_taken_and_nothing_else(operated: Server) -> None:
    for key in ("k1", "k2", "boss"):
        assert post(operated, bearer(key)) == 200
    for key in ("k1, k2", "k", "k1,"):
        assert post(operated, bearer(key)) == 401


def test_what_shows_or_changes_the_server_takes_the_operators_key_alone(operated: Server) -> None:
    for method, path in (("POST", "/cache/flush"), ("POST", "/flush_cache"), ("GET", "/timeline")):
        assert operated.http.request(method, path, headers=bearer("k1")).status_code == 401
        assert operated.http.request(method, path, headers=bearer("boss")).status_code == 200
    assert operated.http.get("/metrics", headers=bearer("k1")).status_code == 200


def test_priority_is_bounded_by_the_key(operated: Server) -> None:
    assert post(operated, bearer("k1"), priority=1) == 400
    assert post(operated, bearer("k1"), priority=-5) == 200
    assert last(operated).priority == -5
    assert post(operated, bearer("boss"), priority=2**31 - 1) == 200
    assert last(operated).priority == 2**31 - 1


def test_a_limit_of_priority_holds_where_nobody_operates(start_server: Start) -> None:
    server = wait_ready(start_server(Settings(priority_limit=3, store="none")))
    assert [post(server, {}, priority=value) for value in (3, 3.0)] == [200, 200]
    assert post(server, {}, priority=4) == 400


@pytest.mark.parametrize(
    ("salt_from", "one", "other"),
    [
        ("key", bearer("k1"), bearer("k2")),
        ("header:X-Tenant", {"x-tenant": "a"}, {"X-Tenant": "b"}),
    ],
)
def test_callers_share_cached_prefixes_with_their_own_kind_alone(
    start_server: Start, salt_from: str, one: dict[str, str], other: dict[str, str]
) -> None:
    server = wait_ready(start_server(Settings(salt_from=salt_from, store="none")))
    salts = []
    for headers, more in ((one, {}), (one, {}), (other, {}), (one, {"cache_salt": "s"})):
        assert post(server, headers, **more) == 200
        salts.append(last(server).salt)
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3 and all(salts)


def test_a_request_past_the_gateway_is_refused(start_server: Start) -> None:
    server = wait_ready(start_server(Settings(salt_from="header:x-tenant", store="none")))
    assert post(server, {}) == 400
    assert post(server, {"x-tenant": ""}) == 400


def test_by_default_all_share_and_a_request_may_keep_apart(operated: Server) -> None:
    post(operated, bearer("k1"))
    assert last(operated).salt == b""
    post(operated, bearer("k1"), cache_salt="mine")
    assert last(operated).salt == b"mine"


def test_a_model_of_several_names(start_server: Start) -> None:
    server = wait_ready(start_server(Settings(served_model_name="a, b/c", store="none")))
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["a", "b/c"]
    assert server.http.get("/v1/models/b/c").json()["id"] == "b/c"
    answer = server.http.post("/v1/completions", json={"model": "b/c", "prompt": "x"}).json()
    assert answer["model"] == "b/c"
    assert post(server, {}, model="tiny") == 404


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"api_key": ""}, "let everyone in"),
        ({"api_key": "a,,b"}, "empty entry"),
        ({"admin_key": ""}, "--admin-key is empty"),
        ({"served_model_name": "a,"}, "empty entry"),
        ({"salt_from": "header:"}, "none, key or header:NAME"),
        ({"salt_from": "cookie"}, "none, key or header:NAME"),
        ({"cors_origins": "localhost"}, "http://HOST:PORT"),
        ({"cors_origins": "http://x/path"}, "without a path"),
        ({"strict_max_tokens": "maybe"}, "true or false"),
        ({"keep_alive_s": "0"}, "1 to"),
    ],
)
def test_a_setting_that_has_a_form_keeps_to_it(given: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        resolve(given, environment={})


@pytest.mark.parametrize("said", ["1", "true", "on", "Yes", True])
def test_switches_in_every_source(said: object) -> None:
    assert resolve({"strict_max_tokens": said}, environment={}).strict_max_tokens
    environment = {"FOREBAY_STRICT_MAX_TOKENS": str(said)}
    assert resolve({}, environment=environment).strict_max_tokens
