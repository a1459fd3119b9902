"""What the engine's L3 may be, behind `backend.PageStore`: this store (`forebay.py`), a private one (`embedded.py`), a directory
(`directory.py`). `open_store` makes one of a Store URL."""

from forebay.store.backends.open import StoreURLError, open_store

__all__ = ["StoreURLError", "open_store"]
