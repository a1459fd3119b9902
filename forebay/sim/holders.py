"""The store as a performance model: holders with DRAM and SSD behind one NIC each.

A page is one record, complete once every stage has written its part. Records go to holders by their hash, leave DRAM least recently
used first between two watermarks (with an SSD: only those written there already), and leave the SSD oldest first. A put that finds no
space fails. Leases, masters and their messages cost nothing here, and nothing is lost.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.sim.cluster import Cluster, Store
from forebay.sim.devices import Link

MAX_PASSED_OVER = 256  # pages on their way to the SSD that one search for space looks past


@dataclass(slots=True)
class Record:
    """``stages``: bit k is set once stage k's part is there. ``durable_at``: when all of it is on the SSD (-1: never)."""

    stages: int = 0
    size: int = 0
    in_dram: bool = True
    durable_at: float = -1.0


class Holder:
    """One machine's DRAM and SSD. ``dram`` and ``ssd`` hold page hashes, least recently used (SSD: oldest) first."""

    def __init__(self, store: Store, latency_s: float, jitter: float, randomness: random.Random) -> None:
        self.nic_in = Link(store.nic_gb_s, latency_s, jitter, randomness)
        self.nic_out = Link(store.nic_gb_s, latency_s, jitter, randomness)
        self.ssd_read = Link(store.ssd_read_gb_s, store.ssd_latency_s, jitter, randomness)
        self.ssd_write = Link(store.ssd_write_gb_s, 0.0, jitter, randomness)
        self.dram: OrderedDict[bytes, None] = OrderedDict()
        self.ssd: OrderedDict[bytes, None] = OrderedDict()
        self.dram_bytes = 0
        self.ssd_bytes = 0


class HolderModel:
    """All holders. ``part_bytes``: what one stage stores of a page; ``read_bytes``: what its ranks read of it together."""

    def __init__(self, cluster: Cluster, randomness: random.Random) -> None:
        self._store = cluster.store
        self._stages = cluster.engine.pp
        self._all = (1 << cluster.engine.pp) - 1
        self.part_bytes = cluster.block_bytes * cluster.writers
        self.read_bytes = cluster.block_bytes * cluster.engine.tp
        network = cluster.network
        self.holders = [Holder(cluster.store, network.latency_s, network.jitter, randomness) for _ in range(cluster.store.holders)]
        self._records: dict[bytes, Record] = {}
        self._high = int(cluster.store.dram * cluster.store.high_watermark)
        self._low = int(cluster.store.dram * cluster.store.low_watermark)
        self.evicted_pages = 0
        self.refused_pages = 0
        self.read_from = {"dram": 0, "ssd": 0}

    def fill(self, hashes: Sequence[bytes]) -> None:
        """These pages are there from the start, as if they had been stored long ago."""
        for hash in hashes:
            for stage in range(self._stages):
                self.put(hash, stage, 0.0)
            record = self._records.get(hash)
            if record is not None and record.durable_at > 0:
                record.durable_at = 0.0
        for holder in self.holders:
            holder.ssd_write.reset()

    def match(self, hashes: Sequence[bytes]) -> int:
        """Leading pages that are complete; they count as used."""
        count = 0
        for hash in hashes:
            record = self._records.get(hash)
            if record is None or record.stages != self._all:
                break
            if record.in_dram:
                self.where(hash).dram.move_to_end(hash)
            count += 1
        return count

    def read(self, hash: bytes, stage: int, now: float) -> float | None:
        """When the stage's part has left its holder, if it is there."""
        record = self._records.get(hash)
        if record is None or not record.stages >> stage & 1:
            return None
        holder = self.where(hash)
        ready = now
        if record.in_dram:
            holder.dram.move_to_end(hash)
            self.read_from["dram"] += self.read_bytes
        else:
            ready = holder.ssd_read.move(now, self.part_bytes)
            self.read_from["ssd"] += self.read_bytes
            if self._store.promotion_on_hit and stage == self._stages - 1 and self._make_room(holder, record.size, ready):
                record.in_dram = True
                holder.dram[hash] = None
                holder.dram_bytes += record.size
        return max(holder.nic_out.move(now, self.read_bytes), ready)

    def put(self, hash: bytes, stage: int, now: float) -> bool:
        """The stage's part has arrived at its holder; False if there is no space for it."""
        record = self._records.get(hash)
        if record is None:
            record = Record()
        elif record.stages >> stage & 1:
            return True
        holder = self.where(hash)
        if record.stages:
            holder.dram.move_to_end(hash)
        if not self._make_room(holder, self.part_bytes, now) or not record.in_dram:
            self.refused_pages += 1
            return False
        self._records[hash] = record
        record.stages |= 1 << stage
        record.size += self.part_bytes
        holder.dram[hash] = None
        holder.dram_bytes += self.part_bytes
        if record.stages == self._all:
            self._write_to_ssd(holder, hash, record, now)
        return True

    def where(self, hash: bytes) -> Holder:
        return self.holders[hash[0] % len(self.holders)]

    def _write_to_ssd(self, holder: Holder, hash: bytes, record: Record, now: float) -> None:
        """A complete page goes to the SSD once, over the oldest ones there."""
        if record.size > self._store.ssd:
            return
        while holder.ssd_bytes + record.size > self._store.ssd:
            oldest, _ = holder.ssd.popitem(last=False)
            dropped = self._records[oldest]
            holder.ssd_bytes -= dropped.size
            dropped.durable_at = -1.0
            if not dropped.in_dram:
                del self._records[oldest]
        holder.ssd[hash] = None
        holder.ssd_bytes += record.size
        record.durable_at = holder.ssd_write.move(now, record.size)

    def _make_room(self, holder: Holder, size: int, now: float) -> bool:
        """Whether ``size`` bytes fit into DRAM, after eviction down to the low watermark if that is needed."""
        if holder.dram_bytes + size <= self._high:
            return True
        passed_over = 0
        for hash in list(holder.dram):
            if holder.dram_bytes + size <= self._low or passed_over == MAX_PASSED_OVER:
                break
            record = self._records[hash]
            if record.durable_at > now:
                passed_over += 1
                continue  # it is on its way to the SSD; before that it may not go
            del holder.dram[hash]
            holder.dram_bytes -= record.size
            record.in_dram = False
            self.evicted_pages += 1
            if record.durable_at < 0:
                del self._records[hash]
        return holder.dram_bytes + size <= self._store.dram
