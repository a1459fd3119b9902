"""Removals that are logged before they are acknowledged (rule S3).

Each present holder whose log may know the key logs a tombstone. For an absent one a live holder keeps it, and the absent one
hears of it before its inventory is believed.
"""

from forebay.store.backend import Status
from forebay.store.master.records import Burial, Holder, Object, State
from forebay.store.wire.messages import Bury, Codes, Forget, Grave

Grave3 = tuple[str, bytes, int]


class Digger:
    """Collects the graves of one request, then sends them all at once."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._by_holder: dict[int, list[Grave3]] = {}

    def bury(self, object: Object) -> None:
        """Every log that may know ``object`` must forget it. Call before its replicas are dropped."""
        holders = {replica.holder.number: replica.holder for replica in object.memory}
        holders |= {replica.holder.number: replica.holder for replica in object.ssd}
        for holder in holders.values():
            if holder.has_log or not holder.present:
                self.bury_at(holder, object.tenant.name, object.key, object.generation)

    def bury_at(self, holder: Holder, tenant: str, key: bytes, generation: int) -> None:
        self._by_holder.setdefault(holder.number, []).append((tenant, key, generation))

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


def graves_against(state: State, holder: Holder) -> dict[tuple[str, bytes], int]:
    """(tenant, key) -> generation that ``holder`` has yet to hear of."""
    return state.graves.get(holder.register.name, {})


def learn(state: State, graves: list[Grave]) -> None:
    """Graves that a holder kept for others, from its inventory."""
    for grave in graves:
        known = state.graves.setdefault(grave.behalf, {})
        place = (grave.tenant, grave.key)
        known[place] = max(grave.generation, known.get(place, 0))


def _hand_over(state: State, number: int, burial: Burial, holder: Holder, graves: list[Grave3]) -> None:
    if holder.present:
        burial.missing.setdefault(holder.number, []).extend(graves)
        state.send(holder.session, Bury(number, [Grave(*grave) for grave in graves]))
        return
    name = holder.register.name
    learn(state, [Grave(tenant, key, generation, name) for tenant, key, generation in graves])
    keepers = [other for other in state.holders.values() if other.present and other is not holder]
    if not keepers:
        burial.codes = bytes([Status.UNAVAILABLE]) * len(burial.codes)
        return
    keeper = next((other for other in keepers if other.has_log), keepers[0])
    burial.missing.setdefault(keeper.number, []).extend(graves)
    state.send(keeper.session, Bury(number, [Grave(*grave, name) for grave in graves]))


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
