"""Removals that are logged before they are acknowledged (rule S3).

Each present holder that has a replica logs a tombstone, and marks its memory so that no later master takes it for alive. For an
absent one a live holder keeps it, and the absent one hears of it before its inventory is believed.
"""

from msgspec.structs import replace

from forebay.store.backend import Status
from forebay.store.master.records import Burial, Holder, Object, State
from forebay.store.wire.messages import Bury, Codes, Forget, Grave


class Digger:
    """Collects the graves of one request, then sends them all at once."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._by_holder: dict[int, list[Grave]] = {}

    def bury(self, object: Object, *, exact: bool = False) -> None:
        """Every holder that knows ``object`` must forget it. Call before its replicas are dropped."""
        holders = {replica.holder.number: replica.holder for replica in object.memory}
        holders |= {replica.holder.number: replica.holder for replica in object.ssd}
        for holder in holders.values():
            self.bury_at(holder, Grave(object.tenant.name, object.key, object.generation, exact))

    def bury_at(self, holder: Holder, grave: Grave) -> None:
        self._by_holder.setdefault(holder.number, []).append(grave)

    def send(self, session: int, call: int | None, codes: bytes, delivers: str = "") -> None:
        """Start the burial; its answer (none if ``call`` is None) goes out once all is logged, at once if nothing need be."""
        state = self._state
        burial = Burial(session, call, codes, {}, delivers)
        number = state.new_number()
        state.burials[number] = burial
        for holder_number, graves in self._by_holder.items():
            _hand_over(state, number, burial, state.holders[holder_number], graves)
        _finish_if_done(state, number, burial)


def buried(state: State, holder: Holder, number: int) -> None:
    """``holder`` has logged its part of burial ``number``."""
    burial = state.burials.get(number)
    if burial is not None and burial.missing.pop(holder.number, None) is not None:
        _finish_if_done(state, number, burial)


def holder_lost(state: State, lost: Holder) -> None:
    """What ``lost`` had not logged yet is kept by a live holder for it."""
    for number, burial in list(state.burials.items()):
        graves = burial.missing.pop(lost.number, None)
        if graves is not None:
            if burial.delivers == lost.register.name:
                del state.burials[number]  # it will be told again when it comes back
                continue
            _hand_over(state, number, burial, lost, graves)
            _finish_if_done(state, number, burial)


def graves_against(state: State, holder: Holder) -> list[Grave]:
    """Graves that ``holder`` has yet to hear of, in the order of their keys' first."""
    return [grave for graves in state.graves.get(holder.register.name, {}).values() for grave in graves]


def is_buried(state: State, holder: Holder, tenant: str, key: bytes, generation: int) -> bool:
    """Whether a generation of ``key`` that ``holder`` brings back was removed while it was away."""
    owed = state.graves.get(holder.register.name, {}).get((tenant, key), ())
    return any(generation == grave.generation if grave.exact else generation <= grave.generation for grave in owed)


def learn(state: State, graves: list[Grave]) -> None:
    """Graves that are kept for an absent holder, newly dug or from its keeper's inventory."""
    for grave in graves:
        places = state.graves.setdefault(grave.behalf, {})
        known = places.get((grave.tenant, grave.key), ())
        if grave not in known:
            places[grave.tenant, grave.key] = (*known, grave)


def _hand_over(state: State, number: int, burial: Burial, holder: Holder, graves: list[Grave]) -> None:
    if holder.present:
        burial.missing.setdefault(holder.number, []).extend(graves)
        state.send(holder.session, Bury(number, graves))
        return
    name = holder.register.name
    kept = [replace(grave, behalf=name) for grave in graves]
    learn(state, kept)
    keepers = [other for other in state.holders.values() if other.present and other is not holder]
    if not keepers:
        burial.codes = bytes([Status.UNAVAILABLE]) * len(burial.codes)
        return
    keeper = next((other for other in keepers if other.has_log), keepers[0])
    burial.missing.setdefault(keeper.number, []).extend(graves)
    state.send(keeper.session, Bury(number, kept))


def _finish_if_done(state: State, number: int, burial: Burial) -> None:
    if burial.missing or number not in state.burials:
        return
    del state.burials[number]
    if burial.call is not None:
        state.send(burial.session, Codes(burial.call, burial.codes))
    if burial.delivers:
        state.graves.pop(burial.delivers, None)
        for holder in state.holders.values():
            if holder.present:
                state.send(holder.session, Forget(burial.delivers))
