"""Forebay serves language models over pipeline stages with a tiered KV cache.

The public face is loaded on first use, so that `import forebay` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.core.sampling import SamplingParams
    from forebay.frontend.llm import LLM, CompletionOutput, RequestOutput

    __version__: str

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "forebay.frontend.llm",
    "CompletionOutput": "forebay.frontend.llm",
    "RequestOutput": "forebay.frontend.llm",
    "SamplingParams": "forebay.core.sampling",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("forebay")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
