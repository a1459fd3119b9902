"""Store URLs (docs/STORE.md): ``embedded[:DIR][?dram=SIZE&ssd=SIZE]``, ``forebay://HOST:PORT``,
``file:DIR[?size=SIZE&free=SIZE]``, ``valkey://`` and ``redis://[USER:PASSWORD@]HOST[:PORT][/DB]``,
``mooncake://MASTER:PORT[?segment=SIZE]``.
"""

import re
from pathlib import Path
from urllib.parse import parse_qsl

from forebay.store.address import AddressError, shown
from forebay.store.backend import PageStore
from forebay.store.backends.directory import DirectoryStore
from forebay.store.backends.embedded import (
    DEFAULT_SSD,
    EmbeddedStore,
    default_directory,
    default_dram,
)
from forebay.store.backends.forebay import ForebayStore
from forebay.store.backends.mooncake import MooncakeStore, MooncakeUrl
from forebay.store.backends.redis import RedisStore, RedisUrl
from forebay.store.client.lent import Lent
from forebay.store.client.prefetcher import PrefetchOptions
from forebay.store.client.store import StoreClient
from forebay.store.wire.tls import TlsError

DEFAULT_FILE_BYTES = 8 << 30
DEFAULT_FREE_BYTES = 1 << 30
_SHIFTS = {None: 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}
_FORMS = (
    "embedded[:DIR], forebay://HOST:PORT, forebay+tls://HOST:PORT, file:DIR, "
    "valkey://HOST:PORT, redis://HOST:PORT (valkeys://, rediss:// by TLS), mooncake://MASTER:PORT "
    "or none"
)


class StoreURLError(ValueError):
    """One line: what was given, what is allowed, what to do."""


def open_store(
    url: str,
    tenant: str = "default",
    secret: str | Path | None = None,
    patient: bool = True,
    lent: Lent | None = None,
) -> PageStore | None:
    """The store that ``url`` names; None for ``none``. ``patient`` and ``lent`` as for `StoreClient.connect`.

    Raises ``StoreURLError``, also if the store does not answer.
    """
    name, _, query = url.partition("?")
    if name == "none":
        return None
    try:
        if name == "embedded" or name.startswith("embedded:"):
            sizes = _sizes(query, {"dram": default_dram(), "ssd": DEFAULT_SSD})
            directory = (
                Path(name.removeprefix("embedded").removeprefix(":"))
                if ":" in name
                else default_directory()
            )
            return EmbeddedStore(directory, sizes["dram"], sizes["ssd"])
        if name.startswith("file:"):
            sizes = _sizes(query, {"size": DEFAULT_FILE_BYTES, "free": DEFAULT_FREE_BYTES})
            return DirectoryStore(Path(name.removeprefix("file:")), sizes["size"], sizes["free"])
        if name.startswith(MooncakeUrl.SCHEME):
            return MooncakeStore(MooncakeUrl.parse(url))
        if name.startswith(RedisUrl.SCHEMES):
            return RedisStore(RedisUrl.parse(url))
        if name.startswith(("forebay://", "forebay+tls://")):
            return ForebayStore(
                StoreClient.connect(
                    url,
                    tenant,
                    secret,
                    prefetch=PrefetchOptions(enabled=True),
                    patient=patient,
                    lent=lent,
                )
            )
    except (AddressError, TlsError, OSError) as error:
        raise StoreURLError(
            f"store {shown(url)!r}: {error}; allowed: {_FORMS}; --store none does without"
        ) from error
    raise StoreURLError(f"{shown(url)!r} is no store; allowed: {_FORMS}")


def url_for_ranks(url: str) -> str:
    """``url`` for the other processes of a server: what only one of them gives to the store is left out."""
    if not url.startswith(MooncakeUrl.SCHEME):
        return url
    where, _, query = url.partition("?")
    kept = "&".join(one for one in query.split("&") if one and not one.startswith("segment="))
    return f"{where}?{kept}" if kept else where


def _sizes(query: str, known: dict[str, int]) -> dict[str, int]:
    """The sizes of a query string over defaults. Raises ``StoreURLError`` for an unknown name or a bad size."""
    sizes = dict(known)
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            raise StoreURLError(f"unknown store option {name!r}; allowed: {', '.join(known)}")
        match = re.fullmatch(r"(\d+)([KMGT]i)?B?", value)
        if match is None or not int(match[1]):
            raise StoreURLError(
                f"store option {name}={value!r} is no size; write it as 512MiB, 8GiB or a number of bytes above 0"
            )
        sizes[name] = int(match[1]) << _SHIFTS[match[2]]
    return sizes
