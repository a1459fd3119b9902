"""The prefetch throttle's state machine: what blocks a repeat, for how long, and what does not."""

import threading

import pytest

from forebay.store.throttle import SHARDS, PrefetchThrottle, State

KEYS = [b"key-%d" % index for index in range(100)]
NOW = 1000.0


@pytest.fixture
def throttle() -> PrefetchThrottle:
    return PrefetchThrottle(dedup_ttl_s=30.0, cooldown_s=5.0)


def test_1_a_fresh_key_is_admitted_once_and_triggered(throttle: PrefetchThrottle) -> None:
    assert throttle.admit(KEYS, NOW) == KEYS
    assert throttle.admit(KEYS, NOW + 29.9) == []
    assert throttle.state(KEYS[0], NOW) is State.TRIGGERED


def test_2_a_key_named_twice_in_one_probe_is_admitted_once_and_order_is_kept(
    throttle: PrefetchThrottle,
) -> None:
    assert throttle.admit([b"b", b"a", b"b", b"c", b"a"], NOW) == [b"b", b"a", b"c"]


@pytest.mark.parametrize("state", [State.ALREADY_RESIDENT, State.DELEGATED])
def test_3_a_healthy_end_of_a_probe_blocks_for_the_dedup_ttl(
    throttle: PrefetchThrottle, state: State
) -> None:
    throttle.admit([b"k"], NOW)
    throttle.move([b"k"], state, NOW + 10)
    assert throttle.state(b"k", NOW + 39) is state and throttle.admit([b"k"], NOW + 39) == []
    assert throttle.admit([b"k"], NOW + 40) == [b"k"]


def test_4_completed_blocks_for_the_dedup_ttl(throttle: PrefetchThrottle) -> None:
    throttle.admit([b"k"], NOW)
    throttle.move([b"k"], State.IN_FLIGHT, NOW)
    throttle.move([b"k"], State.COMPLETED, NOW + 1)
    assert throttle.admit([b"k"], NOW + 30.9) == [] and throttle.admit([b"k"], NOW + 31) == [b"k"]


def test_5_failed_blocks_for_the_cooldown_only(throttle: PrefetchThrottle) -> None:
    throttle.admit([b"k"], NOW)
    throttle.move([b"k"], State.IN_FLIGHT, NOW)
    throttle.move([b"k"], State.FAILED, NOW + 1)
    assert throttle.admit([b"k"], NOW + 5.9) == [] and throttle.admit([b"k"], NOW + 6) == [b"k"]


def test_6_in_flight_is_refreshed_while_it_lasts(throttle: PrefetchThrottle) -> None:
    throttle.admit([b"k"], NOW)
    for second in range(0, 90, 20):
        throttle.move([b"k"], State.IN_FLIGHT, NOW + second)
    assert throttle.admit([b"k"], NOW + 100) == []
    assert throttle.admit([b"k"], NOW + 110) == [b"k"]


def test_7_steps_that_are_not_in_the_table_change_nothing(throttle: PrefetchThrottle) -> None:
    throttle.move([b"unknown"], State.FAILED, NOW)
    assert throttle.state(b"unknown", NOW) is None
    throttle.admit([b"k"], NOW)
    throttle.move([b"k"], State.COMPLETED, NOW)
    assert throttle.state(b"k", NOW) is State.TRIGGERED, "not without being in flight"
    throttle.move([b"k"], State.DELEGATED, NOW)
    for state in State:
        throttle.move([b"k"], state, NOW)
        assert throttle.state(b"k", NOW) is State.DELEGATED, "it ends here"


def test_8_a_global_cooldown_admits_nothing_until_it_is_over(throttle: PrefetchThrottle) -> None:
    throttle.open_cooldown(NOW)
    assert throttle.cooling(NOW + 4.9) and throttle.admit(KEYS, NOW + 4.9) == []
    assert not throttle.cooling(NOW + 5) and throttle.admit(KEYS, NOW + 5) == KEYS, (
        "what was declined is not blocked"
    )


def test_9_a_waiting_read_ignores_the_cooldown_and_nothing_else(throttle: PrefetchThrottle) -> None:
    throttle.admit([b"old"], NOW)
    throttle.open_cooldown(NOW)
    assert throttle.admit([b"old", b"new"], NOW + 1, despite_cooldown=True) == [b"new"]


def test_10_memory_is_bounded_expired_keys_make_room_and_living_ones_decline_newcomers() -> None:
    throttle = PrefetchThrottle(dedup_ttl_s=30.0, max_keys_per_shard=2)
    many = [b"%d" % index for index in range(1000)]
    assert len(throttle.admit(many, NOW)) == 2 * SHARDS
    assert len(throttle.admit([b"x%d" % index for index in range(1000)], NOW + 1)) == 0
    assert len(throttle.admit(many, NOW + 31)) == 2 * SHARDS
    assert sum(throttle.counts(NOW + 31).values()) == 2 * SHARDS


def test_11_threads_that_probe_the_same_keys_admit_each_once(throttle: PrefetchThrottle) -> None:
    admitted: list[bytes] = []
    start = threading.Barrier(8)

    def probe() -> None:
        start.wait()
        admitted.extend(throttle.admit(KEYS, NOW))

    threads = [threading.Thread(target=probe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(admitted) == sorted(KEYS)
