"""What a server takes of the memory that it may use, and what it refuses, with the number that would do."""

import re

import pytest

from forebay import machine
from forebay.machine import Cores, Memory
from forebay.runtime.sizing import Needs, choose_sizes, threads_per_rank, warn_of_shared_memory
from forebay.runtime.start_error import StartError
from forebay.settings import Settings, parse_size, resolve

GIB, MIB = 1 << 30, 1 << 20
NEEDS = Needs(weights=300 * MIB, processes=330 * MIB, least_pages=64 * MIB)


def box(limit: int, free: int | None = None) -> Memory:
    return Memory(limit, limit if free is None else free, "the memory limit of the control group")


def settings(**given: object) -> Settings:
    return resolve(given, environment={})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("limit", [GIB, 2 * GIB, 64 * GIB])
def test_defaults_and_all_else_fit_the_limit(limit: int, ranks: int) -> None:
    sizes = choose_sizes(settings(pp=ranks), NEEDS, box(limit))
    pages = ranks * (sizes.device_memory + sizes.host_memory)
    assert NEEDS.least_pages <= pages <= 0.45 * limit + ranks
    assert pages + NEEDS.fixed <= limit
    assert sizes.host_memory == 2 * sizes.device_memory


def test_on_a_machine_of_its_own_a_server_takes_the_shares_it_always_took() -> None:
    sizes = choose_sizes(settings(), NEEDS, box(64 * GIB, 48 * GIB))
    assert sizes.device_memory == pytest.approx(0.15 * 48 * GIB, abs=1)


def test_a_model_that_does_not_fit_is_refused_with_a_number_that_would_do() -> None:
    with pytest.raises(StartError, match=r"needs about 710\.00MiB .* is 512\.00MiB") as refused:
        choose_sizes(settings(), NEEDS, box(512 * MIB, 500 * MIB))
    said = re.search(r"give it (\S+),", str(refused.value))
    assert said
    enough = parse_size(said[1])
    assert enough < 1.05 * (710 + 12) * MIB
    choose_sizes(settings(), NEEDS, box(enough, enough - 12 * MIB))


@pytest.mark.parametrize("given", [{"host_memory": "1GiB"}, {"device_memory": "900MiB"}])
def test_sizes_that_do_not_fit_are_refused_with_a_number_that_would_do(given: dict) -> None:
    with pytest.raises(StartError, match=r"give less, or .* of memory") as refused:
        choose_sizes(settings(**given, pp=2), NEEDS, box(2 * GIB))
    said = re.search(r"or (\S+) of memory", str(refused.value))
    assert said
    choose_sizes(settings(**given, pp=2), NEEDS, box(parse_size(said[1]), 2 * GIB))


@pytest.mark.parametrize("weights", [MIB, 300 * MIB, 14 * GIB])
def test_a_private_store_has_its_share_of_the_number(weights: int) -> None:
    needs = Needs(weights, 400 * MIB, 8 * MIB, has_private_store=True)
    assert needs.least - needs.fixed >= needs.store_bytes(needs.least) + needs.least_pages
    sizes = choose_sizes(settings(), needs, box(needs.least + MIB))
    assert sizes.device_memory + sizes.host_memory >= 0.99 * needs.least_pages


def test_who_gives_both_sizes_is_asked_only_whether_they_fit() -> None:
    tight = NEEDS.fixed + 3 * MIB
    both = settings(device_memory="1MiB", host_memory="2MiB")
    assert choose_sizes(both, NEEDS, box(tight, 0)).host_memory == 2 * MIB
    with pytest.raises(StartError):
        choose_sizes(both, NEEDS, box(tight - 1))


@pytest.mark.parametrize(
    ("given", "there", "is_said"),
    [
        ({"device": "cuda", "tp": 2}, 64 * MIB, True),
        ({"device": "cuda", "tp": 2}, GIB, False),
        ({"device": "cuda"}, 0, False),
        ({"tp": 2}, 0, False),
    ],
)
def test_a_shortage_in_dev_shm_is_said_where_something_uses_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: dict,
    there: int,
    is_said: bool,
) -> None:
    monkeypatch.setattr(machine, "shared_memory", lambda: there)
    warn_of_shared_memory(settings(**given))
    said = capsys.readouterr().err
    assert ("may need 128.00MiB of /dev/shm for 2 ranks, and 64.00MiB is free" in said) is is_said


def test_a_quota_is_shared_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: Cores(3, 8))
    assert threads_per_rank(settings(pp=2)) == 1
    assert "the CPU quota is 3 of 8 cores; 1 thread(s) for each rank (2)" in capsys.readouterr().err
    assert threads_per_rank(settings(threads_per_rank=8)) == 8
    assert capsys.readouterr().err == ""
