"""Removals that are logged before they are acknowledged (rule ST3).

Each present holder that has a replica logs a tombstone, and marks its memory so that no later master takes it for alive. For an
absent one a live holder keeps it, and the absent one hears of it before its inventory is believed. Holders remember each other's
names, so a restarted master knows of a holder that was absent all the time: it may have anything, so every grave is kept for it.
"""

from msgspec.structs import replace

from forebay.store.backend import Status
from forebay.store.master.records import Burial, Holder, Object, State
from forebay.store.wire.messages import MAX_ENTRIES, Bury, Codes, Forget, Grave, batched


class Digger:
    """Collects the graves of one request, then sends them all at once. ``_gone``: up to which generation each key is gone once the
    request is answered, and whether puts of it that were given up matter too."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._gone: dict[tuple[str, bytes], tuple[int, bool]] = {}
        self._by_holder: dict[int, list[Grave]] = {}
        self._for_unheard: list[Grave] = []

    def bury(self, object: Object) -> None:
        """Every holder that knows ``object`` must forget it. Call before its replicas are dropped."""
        for holder in object.holders().values():
            self.bury_at(holder, Grave(object.tenant.name, object.key, object.generation))
        self._gone[object.tenant.name, object.key] = (object.generation, True)
        if self._state.unheard:
            self._for_unheard.append(Grave(object.tenant.name, object.key, object.generation))

    def supersede(self, object: Object) -> None:
        """``object`` is stored where nothing was: what was there before may not come back."""
        self._gone[object.tenant.name, object.key] = (object.generation - 1, False)

    def bury_at(self, holder: Holder, grave: Grave) -> None:
        self._by_holder.setdefault(holder.number, []).append(grave)

    def send(self, session: int, call: int | None, codes: bytes, delivers: str = "") -> None:
        """Start the burial; its answer (none if ``call`` is None) goes out once all is logged, at once if nothing need be."""
        state = self._state
        if state.burials and self._gone:
            self._overtake()
        if not self._by_holder and not self._for_unheard and not delivers:
            if call is not None:
                state.send(session, Codes(call, codes))
            return
        delivered = (
            [grave for graves in self._by_holder.values() for grave in graves] if delivers else []
        )
        burial = Burial(session, call, codes, {}, delivers, delivered)
        burial.places |= {
            (grave.tenant, grave.key) for graves in self._by_holder.values() for grave in graves
        }
        burial.places |= {(grave.tenant, grave.key) for grave in self._for_unheard}
        number = state.new_number()
        state.burials[number] = burial
        for holder_number, graves in self._by_holder.items():
            _hand_over(state, number, burial, state.holders[holder_number], graves)
        for name in state.unheard if self._for_unheard else ():
            _keep(state, number, burial, name, self._for_unheard)
        _finish_if_done(state, number, burial)

    def _overtake(self) -> None:
        """A holder that has yet to log an earlier removal of a key still has it alive, and would bring it back to a new master: so it
        must have logged this one too before it is answered."""
        state = self._state
        told = {number: {*graves} for number, graves in self._by_holder.items()}
        for burial in state.burials.values():
            if burial.places.isdisjoint(self._gone):
                continue
            for number, graves in burial.missing.values():
                for grave in graves:
                    generation, all_of_it = self._gone.get((grave.tenant, grave.key), (0, False))
                    newer = Grave(grave.tenant, grave.key, generation, behalf=grave.behalf)
                    if (
                        generation < grave.generation
                        or newer in told.get(number, ())
                        or (grave.exact and not all_of_it)
                    ):
                        continue
                    told.setdefault(number, set()).add(newer)
                    self.bury_at(state.holders[number], newer)
                    if grave.behalf:
                        learn(state, [newer])


def may_bury(state: State, object: Object) -> bool:
    """Whether every holder that may have ``object`` is there, or another one to keep the removal for it."""
    present = {holder.register.name for holder in state.holders.values() if holder.present}
    absent = {holder.register.name for holder in object.holders().values() if not holder.present}
    return all(present - {name} for name in absent | state.unheard.keys())


def buried(state: State, holder: Holder, bury: int) -> None:
    """``holder`` has logged the graves of message ``bury``."""
    number = state.buries.get(bury)
    burial = state.burials.get(number) if number is not None else None
    if number is None or burial is None or burial.missing[bury][0] != holder.number:
        return
    del state.buries[bury], burial.missing[bury]
    _finish_if_done(state, number, burial)


def holder_lost(state: State, lost: Holder) -> None:
    """What ``lost`` had not logged yet is kept by a live holder for it."""
    for number, burial in list(state.burials.items()):
        owed = [
            (bury, graves)
            for bury, (holder, graves) in burial.missing.items()
            if holder == lost.number
        ]
        for bury, graves in owed:
            del state.buries[bury], burial.missing[bury]
            if burial.delivers != lost.register.name:
                for behalf in dict.fromkeys(grave.behalf for grave in graves):
                    some = [grave for grave in graves if grave.behalf == behalf]
                    _keep(state, number, burial, behalf or lost.register.name, some)
        if owed and burial.delivers == lost.register.name:
            for bury in burial.missing:
                del state.buries[bury]
            del state.burials[number]  # it will be told again when it comes back
        elif owed:
            _finish_if_done(state, number, burial)


def graves_against(state: State, holder: Holder) -> list[Grave]:
    """Graves that ``holder`` has yet to hear of, in the order of their keys' first."""
    return [
        grave for graves in state.graves.get(holder.register.name, {}).values() for grave in graves
    ]


class Deaths:
    """What a holder may not bring back with a piece of its inventory: removed while it was away, or removed since it registered by a
    message that it had not seen when it sent the piece."""

    def __init__(self, state: State, holder: Holder) -> None:
        self._owed = state.graves.get(holder.register.name, {})
        self._under_way: dict[tuple[str, bytes], list[Grave]] = {}
        for burial in state.burials.values():
            for number, graves in burial.missing.values():
                for grave in graves if number == holder.number else ():
                    if not grave.behalf:
                        self._under_way.setdefault((grave.tenant, grave.key), []).append(grave)

    def of(self, tenant: str, key: bytes, generation: int) -> Grave | None:
        """What the holder must be told to bury if that generation is dead; None if it is not.

        A put that was given up is dead by itself (exact): what the key held before it lives on.
        """
        graves = (*self._owed.get((tenant, key), ()), *self._under_way.get((tenant, key), ()))
        if any(not grave.exact and generation <= grave.generation for grave in graves):
            return Grave(tenant, key, generation)
        if any(grave.exact and generation == grave.generation for grave in graves):
            return Grave(tenant, key, generation, True)
        return None


def learn(state: State, graves: list[Grave]) -> None:
    """Graves that are kept for an absent holder, newly dug or from its keeper's inventory."""
    for grave in graves:
        places = state.graves.setdefault(grave.behalf, {})
        known = places.get((grave.tenant, grave.key), ())
        if grave not in known:
            places[grave.tenant, grave.key] = (*known, grave)


def _hand_over(
    state: State, number: int, burial: Burial, holder: Holder, graves: list[Grave]
) -> None:
    if holder.present:
        _send(state, number, burial, holder, graves)
    else:
        _keep(state, number, burial, holder.register.name, graves)


def _keep(state: State, number: int, burial: Burial, name: str, graves: list[Grave]) -> None:
    """A live holder, best one with a log, keeps the graves for the absent holder ``name``. If there is none any more, this master alone
    knows of the removal: it may last or not."""
    kept = [replace(grave, behalf=name) for grave in graves]
    learn(state, kept)
    keepers = [
        holder
        for holder in state.holders.values()
        if holder.present and holder.register.name != name
    ]
    if not keepers:
        burial.codes = bytes(Status.TIMEOUT if code == Status.OK else code for code in burial.codes)
        return
    _send(
        state,
        number,
        burial,
        next((holder for holder in keepers if holder.has_log), keepers[0]),
        kept,
    )


def _send(state: State, number: int, burial: Burial, holder: Holder, graves: list[Grave]) -> None:
    """Each message has a number of its own: one holder may be sent several for one burial, and must have logged them all."""
    for some in batched(graves, MAX_ENTRIES):
        bury = state.new_number()
        state.buries[bury] = number
        burial.missing[bury] = (holder.number, some)
        state.send(holder.session, Bury(bury, some))


def _finish_if_done(state: State, number: int, burial: Burial) -> None:
    if burial.missing or number not in state.burials:
        return
    del state.burials[number]
    if burial.call is not None:
        state.send(burial.session, Codes(burial.call, burial.codes))
    if burial.delivers:
        _delivered(state, burial)


def _delivered(state: State, burial: Burial) -> None:
    """The returned holder has logged these graves. When nothing more is owed to it, its keepers may forget them; but not one that is
    still telling what it keeps."""
    owed = state.graves.get(burial.delivers, {})
    for grave in burial.delivered:
        place = (grave.tenant, grave.key)
        rest = tuple(
            kept
            for kept in owed.get(place, ())
            if replace(kept, behalf="") != replace(grave, behalf="")
        )
        if rest:
            owed[place] = rest
        else:
            owed.pop(place, None)
    if not owed:
        state.graves.pop(burial.delivers, None)
        for holder in state.holders.values():
            if holder.complete:
                state.send(holder.session, Forget(burial.delivers))
