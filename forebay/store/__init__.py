"""A distributed store of KV pages with DRAM and SSD tiers (L3), useful by itself.

client/     StoreClient, AsyncStoreClient: who asks
master/     who has what: a sans-IO state machine and its server
holder/     keeps bytes: a DRAM segment shared read-only, a log on SSD
wire/       messages, frames, who may talk
backends/   what the engine sees (`backend.PageStore`): this store, a directory
"""

from forebay.store.backend import GetItem, Health, PageStore, PutItem, Status
from forebay.store.backends import StoreURLError, open_store
from forebay.store.client.aio import AsyncStoreClient
from forebay.store.client.store import StoreClient

__all__ = [
    "AsyncStoreClient",
    "GetItem",
    "Health",
    "PageStore",
    "PutItem",
    "Status",
    "StoreClient",
    "StoreURLError",
    "open_store",
]
