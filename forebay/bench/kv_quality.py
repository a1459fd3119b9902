"""`forebay bench kv MODEL`: what a format of the KV cache costs in quality, against the cache as it is computed.

The model writes a few texts itself, sampling at temperature 1 with its cache unquantised. Then every format reads the same texts, all
KV through its pages, and its distribution of each next token is held against the unquantised one:

    mean_kl           Kullback and Leibler's divergence of the format's distribution from the unquantised one, nats a token
    greedy_agreement  share of positions at which both would choose the same token
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forebay.models.batch import SequenceWork, build_batch
from forebay.models.config import load_config
from forebay.models.kv import KVPool, page_block
from forebay.models.kv_format import KV_FORMATS, KvFormat, kv_format
from forebay.models.llama import Stage, load_stage
from forebay.models.resolve import resolve_model
from forebay.models.shard import whole
from forebay.models.tokenizer import Tokenizer
from forebay.runtime.sampler import uniform

OPENINGS = (
    "The river", "Once upon a time, in a village by the sea,", "To install the program, first", "Water boils at",
    "The most important idea of the paper is", "def sort(numbers):", "Dear Sir or Madam,", "In 1905, Albert Einstein",
)  # fmt: skip
CHUNK = 64


def run(
    model: str, dtype: str, tokens: int, page_size: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """``tokens``: of each text, its opening included. ``dtype``: of the computation, or ``auto``. Raises ``ModelError``."""
    resolved = resolve_model(model)
    config = load_config(resolved.path)
    compute = getattr(torch, config.dtype if dtype == "auto" else dtype)
    tokens = min(tokens, config.max_context)
    stage = load_stage(
        resolved.path, config, whole(config), compute, kv_formats=KV_FORMATS.values()
    )
    tokenizer = Tokenizer(resolved.path)
    plain = _Reader(stage, page_size, tokens, kv_format("auto", compute))
    readers = [
        _Reader(stage, page_size, tokens, form)
        for form in KV_FORMATS.values()
        if form != plain.form
    ]
    sums = {reader.form.name: [0.0, 0.0] for reader in readers}
    positions = 0
    for number, opening in enumerate(OPENINGS):
        say(f"text {number + 1} of {len(OPENINGS)}")
        text = plain.write(tokenizer.encode(opening), number)
        expected = plain.read(text)
        positions += len(text)
        for reader in readers:
            got = reader.read(text)
            sums[reader.form.name][0] += float((expected.exp() * (expected - got)).sum())
            sums[reader.form.name][1] += int((expected.argmax(-1) == got.argmax(-1)).sum())
    rows = [
        {"kv_dtype": name, "mean_kl": kl / positions, "greedy_agreement": same / positions}
        for name, (kl, same) in sums.items()
    ]
    sizes = {
        form.name: page_block(config, whole(config), page_size, form).size / page_size
        for form in KV_FORMATS.values()
    }
    about = {
        "model": resolved.name,
        "dtype": str(compute).removeprefix("torch."),
        "texts": len(OPENINGS),
        "tokens": tokens,
    }
    return {"config": {**about, "page_size": page_size, "bytes_per_token": sizes}, "rows": rows}


class _Reader:
    """The model over pages of one format, one text at a time."""

    def __init__(self, stage: Stage, page_size: int, tokens: int, form: KvFormat) -> None:
        self.form = form
        self._stage = stage
        self._page_size = page_size
        self._tokens = tokens
        self._table = list(range(-(-tokens // page_size)))
        self._pool = KVPool(
            stage.config,
            stage.shard,
            len(self._table),
            page_size,
            stage.dtype,
            torch.device("cpu"),
            form,
        )

    @torch.inference_mode()
    def write(self, text: list[int], seed: int) -> list[int]:
        """``text`` gone on with, up to the length asked for."""
        text = text[: self._tokens]
        logits = self._pass(text, 0)[-1]
        while len(text) < self._tokens:
            chances = torch.softmax(logits.double(), -1).cumsum(-1)
            text.append(
                min(int(torch.searchsorted(chances, uniform(seed, len(text)))), len(logits) - 1)
            )
            logits = self._pass(text[-1:], len(text) - 1)[-1]
        return text

    @torch.inference_mode()
    def read(self, text: list[int]) -> Tensor:
        """Log-probabilities ``(len(text), vocabulary)`` of what comes after each token."""
        return torch.cat(
            [self._pass(text[at : at + CHUNK], at) for at in range(0, len(text), CHUNK)]
        ).log_softmax(-1)

    def _pass(self, tokens: list[int], context: int) -> Tensor:
        batch = build_batch([SequenceWork(len(tokens), context, self._table)], self._page_size)
        return self._stage.forward(
            torch.tensor(tokens),
            dataclasses.replace(batch, sample_rows=torch.arange(len(tokens))),
            self._pool,
        )
