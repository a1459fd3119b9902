"""The offline face: `LLM` runs the same planner and workers as the server, for a script.

        caller's thread --- generate() ---> loop thread: Engine, planner process ---> results

The loop lives in a thread of its own, so that `LLM` works in a plain script and inside a running event loop alike. That thread
also starts the planner, since the kernel ends children together with the thread that made them.
"""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import uvloop

from forebay.core.messages import Snapshot
from forebay.core.sampling import SamplingParams
from forebay.frontend.asked import Asked, Source, Texts, TokenLists
from forebay.frontend.asked import Conversation as Talk
from forebay.frontend.assemble import assemble, bounds
from forebay.frontend.engine import MAX_UNSENT_FRAMES, Engine, Planner
from forebay.frontend.generation import Event, Generation, Result, collect
from forebay.frontend.later import refuse_later
from forebay.frontend.model import ServedModel, load_served_model
from forebay.frontend.prompts import Prompt, PromptEncoder
from forebay.frontend.seeds import SeedCounter
from forebay.frontend.sequence import Position
from forebay.models.resolve import resolve_model
from forebay.runtime.launch import start_planner
from forebay.settings import Settings, listed, resolve

STOP_S = 25.0

T = TypeVar("T")
PromptInput = str | list[int] | Prompt
Conversation = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Logprob:
    """``rank``: 1 for the most likely; None for a chosen token beyond those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. ``logprobs``: for each token of the text, by token id, if they were asked for."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All choices of one prompt. ``prompt`` is None where token ids were given. ``num_cached_tokens`` is the sum over the tiers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cached_device: int = 0
    cached_host: int = 0
    cached_store: int = 0


class LLM:
    """A model and its engine, ready when the constructor returns. Close it, use it as a context manager, or let the
    interpreter's exit do it.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        """``model`` and ``settings`` as for `forebay serve` (`forebay config` lists them); sizes may be text.

        Raises ``SettingsError``, ``models.errors.ModelError``, ``runtime.launch.StartError``, and ``EngineDown`` if the
        engine does not come up.
        """
        self._start(model, resolve(refuse_later(settings), caller="LLM"))

    @classmethod
    def from_settings(cls, model: str, settings: Settings) -> "LLM":
        """With settings that are resolved already."""
        llm = cls.__new__(cls)
        llm._start(model, settings)
        return llm

    def _start(self, model: str, settings: Settings) -> None:
        self._host = _Host(model, settings)
        self._finalizer = weakref.finalize(self, self._host.close)
        try:
            self._host.call(self._host.start())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue text, token ids, or several of either; one result for each prompt, in order.

        ``sampling_params``: for all prompts, or one for each. Raises ``PromptError`` for a prompt that cannot be served, ``ValueError``
        for parameters that cannot, and ``GenerationError`` if the engine gives up.
        """
        inputs = _as_list(prompts)
        return self._host.call(
            self._host.run_all(
                inputs, _for_each(sampling_params or self.default_params, len(inputs))
            )
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """The next message of one or several conversations (lists of ``{"role", "content"}``), as `generate` otherwise.

        Raises also ``models.tokenizer.TemplateError``.
        """
        conversations: Any = (
            [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        prompts = self._host.call(self._host.render_all(conversations, add_generation_prompt))
        return self._host.call(
            self._host.run_all(
                prompts, _for_each(sampling_params or self.default_params, len(prompts))
            )
        )

    def stream(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """The text of one prompt piece by piece; stopping early stops the engine's work too. ``n`` must be 1."""
        params = sampling_params or self.default_params
        if params.n != 1:
            raise ValueError(f"n is {params.n}; a stream has one text")
        generation = self._host.call(self._host.submit(prompt, params))
        events = generation.events()
        try:
            while batch := self._host.call(_next(events)):
                yield "".join(delta.text for _, delta in batch)
        finally:
            if self._finalizer.alive:
                self._host.call(_close(generation))

    def render_chat(self, messages: Conversation, add_generation_prompt: bool = True) -> Prompt:
        """The prompt that the model's chat template makes of a conversation, for `generate` and `stream`."""
        return self._host.call(self._host.render_all([messages], add_generation_prompt))[0]

    def flush_cache(
        self, tiers: Sequence[str] = ("device", "host"), timeout_s: float = 30.0
    ) -> int:
        """Forget cached pages of these tiers (`device`, `host`) once nothing in flight needs them; the number of pages freed.

        Raises ``TimeoutError`` naming what still holds pages after ``timeout_s``, and ``EngineDown``.
        """
        return self._host.call(self._host.flush(tiers, timeout_s))

    @property
    def default_params(self) -> SamplingParams:
        """What is taken where no parameters are given: the model's own recommendation, if it has one."""
        fields: dict[str, Any] = dict(self._host.model.sampling)
        return SamplingParams(**fields)

    @property
    def snapshot(self) -> Snapshot:
        """The planner's last word: queues, pages, hits."""
        return self._host.snapshot

    @property
    def planner_pid(self) -> int:
        """The process whose children the ranks are."""
        return self._host.planner_pid

    @property
    def model_name(self) -> str:
        return self._host.model.name

    def close(self) -> None:
        """End the engine and its processes. Safe to call again."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass
class _Host:
    """The loop thread and what lives on it. Apart from `LLM`, so that nothing here keeps an `LLM` alive."""

    name: str
    settings: Settings
    _loop: asyncio.AbstractEventLoop = field(default_factory=uvloop.new_event_loop)
    _planner: Planner | None = None
    _engine: Engine | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="forebay-llm", daemon=True
        )
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop thread and wait; an interrupted wait cancels the work."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def snapshot(self) -> Snapshot:
        assert self._engine is not None and self._engine.snapshot is not None
        return self._engine.snapshot

    @property
    def planner_pid(self) -> int:
        assert self._planner is not None
        return self._planner.process.pid

    async def start(self) -> None:
        resolved = resolve_model(self.name)
        self._planner = start_planner(resolved, self.settings)
        name = listed(self.settings.served_model_name or resolved.name)[0]
        self.model: ServedModel = load_served_model(
            resolved.path, name, self._planner.max_context, self.settings.generation_config
        )
        self.encoder = PromptEncoder(
            self.model.tokenizer,
            self.model.max_context,
            self.model.vocab_size,
            self.settings.message_special_tokens,
        )
        self.seeds = SeedCounter(self.settings.seed)
        self._engine = Engine(self._planner)
        await self._engine.wait_ready()
        self._places = min(self.settings.max_running + self.settings.max_waiting, MAX_UNSENT_FRAMES)
        self._entry = asyncio.Lock()

    async def submit(self, prompt: PromptInput, params: SamplingParams) -> Generation:
        """Once there is room: who comes first goes first, so that a few large requests do not wait for ever."""
        assert self._engine is not None
        asked = Asked(_source(prompt), params)
        prompts = (
            [prompt] if isinstance(prompt, Prompt) else await self.encoder.encode(asked.source)
        )
        model = self.model
        limits = bounds(model.max_context, model.vocab_size, self._engine.snapshot, self.settings)
        work = assemble(asked, prompts, replace(limits, places=self._places), "llm")
        async with self._entry:
            await self._engine.wait_room(params.n, self._places)
            return Generation(
                self._engine, work, self.model.eos, self.seeds, self.model.detokenizer
            )

    async def run_all(
        self, prompts: Sequence[PromptInput], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        tasks = [
            asyncio.ensure_future(self._run(prompt, own))
            for prompt, own in zip(prompts, params, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:  # where one fails or the caller is interrupted, the others are not worth going on
            for task in tasks:
                task.cancel()

    async def flush(self, tiers: Sequence[str], timeout_s: float) -> int:
        assert self._engine is not None
        unknown = set(tiers) - {"device", "host"}
        if unknown:
            raise ValueError(
                f"tiers {sorted(unknown)} cannot be flushed here; allowed: device, host"
            )
        done = await self._engine.flush(tiers, timeout_s)
        if done.busy:
            raise TimeoutError(f"after {timeout_s:.0f} s there are still {'; '.join(done.busy)}")
        return done.freed_pages

    async def render_all(
        self, conversations: Sequence[Conversation], add_generation_prompt: bool
    ) -> list[Prompt]:
        return [
            await self.encoder.from_conversation(Talk(tuple(messages), add_generation_prompt))
            for messages in conversations
        ]

    def close(self) -> None:
        """From any thread but the loop's own."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        if self._engine is not None:
            self._engine.close("this LLM is being closed")
            self.encoder.close()
        if self._planner is not None:
            self._planner.stop(STOP_S)

    async def _run(self, prompt: PromptInput, params: SamplingParams) -> RequestOutput:
        with await self.submit(prompt, params) as generation:
            results = await collect(generation)
        cached = generation.cached
        ready = generation.work.prompts[0]
        return RequestOutput(
            request_id=generation.work.request_id,
            prompt=ready.text,
            prompt_token_ids=ready.tokens,
            outputs=[
                self._completion(index, result, params) for index, result in enumerate(results)
            ],
            num_cached_tokens=cached.cached_device + cached.cached_host + cached.cached_store,
            prompt_logprobs=self._prompt_logprobs(generation),
            cached_device=cached.cached_device,
            cached_host=cached.cached_host,
            cached_store=cached.cached_store,
        )

    def _prompt_logprobs(self, generation: Generation) -> list[dict[int, Logprob] | None] | None:
        if generation.work.params.prompt_logprobs is None:
            return None
        return [
            None if position.logprobs is None else self._logprobs(position)
            for position in generation.prompt_positions(0)
        ]

    def _completion(self, index: int, result: Result, params: SamplingParams) -> CompletionOutput:
        logprobs = None
        if params.logprobs is not None:
            logprobs = [self._logprobs(position) for position in result.positions]
        cumulative = (
            sum(position.logprobs.chosen for position in result.positions if position.logprobs)
            if logprobs is not None
            else None
        )
        return CompletionOutput(
            index,
            result.text,
            result.tokens,
            cumulative,
            logprobs,
            result.finish,
            result.stop_reason,
        )

    def _logprobs(self, position: Position) -> dict[int, Logprob]:
        spell = self.model.spelling.alone
        logprobs = position.logprobs
        assert logprobs is not None
        found = {
            token: Logprob(value, rank, spell(token))
            for rank, (token, value) in enumerate(
                zip(logprobs.top_ids, logprobs.top, strict=True), start=1
            )
        }
        found.setdefault(position.token, Logprob(logprobs.chosen, None, position.text))
        return found


def _source(prompt: PromptInput) -> Source:
    if isinstance(prompt, str):
        return Texts((prompt,))
    return TokenLists((list(prompt.tokens if isinstance(prompt, Prompt) else prompt),))


async def _next(events: AsyncIterator[list[Event]]) -> list[Event]:
    return await anext(events, [])


async def _close(generation: Generation) -> None:
    generation.close()


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[Any]:
    if isinstance(prompts, str | Prompt) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(
            f"{len(params)} sampling parameters for {count} prompts; give one, or one for each"
        )
    return list(params)
