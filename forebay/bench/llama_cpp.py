"""llama.cpp as what `bench engine` measures: its own library through llama-cpp-python's bindings, several sequences in one batch.

It keeps the keys and values of its last call, as `llama_cpp.Llama` does: what a prompt shares with the one
before it is not computed again, all but its last token.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

BATCH, MICRO_BATCH = 2048, 512
SEQUENCES_MAX = 8


class LlamaCppError(Exception):
    """It cannot be had, or did not do what it was asked. One line."""


class LlamaCpp:
    """``context``: tokens of all sequences together. Raises ``LlamaCppError``."""

    def __init__(self, file: Path, threads: int, context: int) -> None:
        try:
            import llama_cpp
        except ImportError as error:
            raise LlamaCppError("not installed; pip install 'forebay[llama]'") from error
        self._lib: Any = llama_cpp
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        options: Any = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        if not self._model:
            raise LlamaCppError(f"it does not load {file.name}")
        self._context = self._open(threads, context)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size: int = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch: Any = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._kept: list[list[int]] = [[] for _ in range(SEQUENCES_MAX)]

    def _open(self, threads: int, context: int) -> Any:
        options: Any = self._lib.llama_context_default_params()
        options.n_ctx = context
        options.n_batch, options.n_ubatch = BATCH, MICRO_BATCH
        options.n_seq_max, options.kv_unified = SEQUENCES_MAX, True
        options.n_threads = options.n_threads_batch = threads
        opened = self._lib.llama_init_from_model(self._model, options)
        if not opened:
            raise LlamaCppError(f"it opens no context of {context} tokens")
        return opened

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt. Raises ``LlamaCppError``."""
        work = [self._begin(number, prompt) for number, prompt in enumerate(prompts)]
        for number in range(len(prompts), SEQUENCES_MAX):
            self._forget(number, 0)
        said: list[list[int]] = [[] for _ in prompts]
        for _ in range(tokens):
            for number, token in enumerate(self._run(work)):
                said[number].append(token)
                work[number] = [token]
        return said

    def _begin(self, number: int, prompt: list[int]) -> list[int]:
        """What of ``prompt`` is to be computed."""
        shared = 0
        for old, new in zip(self._kept[number], prompt[:-1], strict=False):
            if old != new:
                break
            shared += 1
        self._forget(number, shared)
        return prompt[shared:]

    def _forget(self, number: int, start: int) -> None:
        memory = self._lib.llama_get_memory(self._context)
        if not self._lib.llama_memory_seq_rm(memory, number, start, -1):
            raise LlamaCppError(f"it does not forget what comes after {start} tokens")
        del self._kept[number][start:]

    def _run(self, work: list[list[int]]) -> list[int]:
        """Compute each sequence's tokens; the likeliest next one of each."""
        entries = [(number, token) for number, tokens in enumerate(work) for token in tokens]
        last = {number: sum(map(len, work[: number + 1])) - 1 for number in range(len(work))}
        ends = set(last.values())
        found: dict[int, int] = {}
        for start in range(0, len(entries), BATCH):
            piece = entries[start : start + BATCH]
            self._decode(piece, [start + index in ends for index in range(len(piece))])
            for index, (number, _) in enumerate(piece):
                if start + index in ends:
                    found[number] = self._likeliest(index)
        return [found[number] for number in range(len(work))]

    def _decode(self, piece: list[tuple[int, int]], wanted: list[bool]) -> None:
        batch = self._batch
        batch.n_tokens = len(piece)
        for index, (number, token) in enumerate(piece):
            batch.token[index] = token
            batch.pos[index] = len(self._kept[number])
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = number
            batch.logits[index] = wanted[index]
            self._kept[number].append(token)
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise LlamaCppError(f"llama_decode gives {status} for {len(piece)} tokens")

    def _likeliest(self, index: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
