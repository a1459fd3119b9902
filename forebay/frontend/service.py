"""What every HTTP route works on: one engine, one model, and the way from a checked request to a running Generation."""

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.core.messages import Snapshot
from forebay.core.sampling import SamplingParams
from forebay.frontend.engine import Engine
from forebay.frontend.errors import ApiError
from forebay.frontend.generation import (
    Generation,
    Work,
    check_sequences,
    check_token_ids,
    fit_max_tokens,
    room_tokens,
    sequence_places,
)
from forebay.frontend.limits import body_limit
from forebay.frontend.model import ServedModel
from forebay.frontend.prompts import Prompt, PromptEncoder
from forebay.frontend.protocol import (
    ChatRequest,
    CompletionRequest,
    cache_salt,
    priority,
    sampling_params,
)
from forebay.frontend.seeds import SeedCounter
from forebay.settings import Settings

if TYPE_CHECKING:
    from forebay.observe.metrics import Metrics


@dataclass
class Service:
    engine: Engine
    model: ServedModel
    settings: Settings
    metrics: "Metrics"

    def __post_init__(self) -> None:
        self.encoder = PromptEncoder(
            self.model.tokenizer, self.model.max_context, self.model.vocab_size
        )
        self.created = int(time.time())
        self.seeds = SeedCounter(self.settings.seed)
        self.body_bytes_max = body_limit(self.model.max_context)

    def check_model(self, name: str) -> None:
        """Raises ``ApiError`` (404) for a model that is not served here."""
        if name != self.model.name:
            message = f"the model {name!r} does not exist; this server has {self.model.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def checked_params(self, request: CompletionRequest | ChatRequest) -> SamplingParams:
        """Raises ``ApiError`` (400)."""
        params = sampling_params(request)
        try:
            check_token_ids(params, self.model.vocab_size)
        except ValueError as error:
            raise ApiError(400, str(error), str(error).split()[0], "invalid_value") from None
        return params

    def generate(
        self,
        request: CompletionRequest | ChatRequest,
        params: SamplingParams,
        prompts: list[Prompt],
        default_tokens: int | None,
        prefix: str,
    ) -> Generation:
        """Submit. Raises ``PromptTooLong``, ``EngineDown``, ``ApiError``."""
        context = self.model.max_context
        room = room_tokens(context, self.engine.snapshot, self.settings.page_size)
        limits = [
            fit_max_tokens(params.max_tokens, default_tokens, len(prompt.tokens), context, room)
            for prompt in prompts
        ]
        if params.min_tokens > min(limits):
            message = f"min_tokens is {params.min_tokens}; at most {min(limits)} tokens are generated here"
            raise ApiError(400, message, "min_tokens", "invalid_value")
        try:
            check_sequences(len(prompts), params.n, sequence_places(self.settings))
        except ValueError as error:
            raise ApiError(400, str(error), "n", "invalid_value") from None
        work = Work(
            request_id=f"{prefix}-{secrets.token_hex(12)}",
            prompts=tuple(prompts),
            max_tokens=tuple(limits),
            params=params,
            salt=cache_salt(request),
            no_store=bool(request.no_store),
            priority=priority(request),
        )
        return Generation(self.engine, work, self.model.eos, self.seeds, self.model.detokenizer)

    def require_ready(self) -> Snapshot:
        """Raises ``EngineDown`` while nothing can be served."""
        self.engine.check_takes_requests()
        assert self.engine.snapshot is not None
        return self.engine.snapshot

    def spell(self, token: int) -> str:
        """One token as text, for log-probabilities."""
        return self.model.tokenizer.decode([token], skip_special=False)
