"""What every HTTP route works on: one engine, one model, and the way from a checked request to a running Generation."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from starlette.requests import Request

from forebay.core.messages import Snapshot
from forebay.frontend.asked import Asked, Source
from forebay.frontend.assemble import Bounds, assemble, bounds
from forebay.frontend.auth import Headers, Keys, salt
from forebay.frontend.disconnect import ClientGone, run_while_connected
from forebay.frontend.engine import Engine, EngineDown
from forebay.frontend.errors import ApiError
from forebay.frontend.generation import Generation
from forebay.frontend.limits import body_limit
from forebay.frontend.model import ServedModel
from forebay.frontend.prompts import Prompt, PromptEncoder, PromptTooLong, RequestError
from forebay.frontend.seeds import SeedCounter
from forebay.models.errors import ModelError
from forebay.models.tokenizer import TemplateError
from forebay.settings import Settings, listed

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
            self.model.tokenizer,
            self.model.max_context,
            self.model.vocab_size,
            self.settings.message_special_tokens,
        )
        own = self.settings.served_model_name
        self.names = listed(own) if own is not None else (self.model.name,)
        self.keys = Keys(self.settings)
        self.created = int(time.time())
        self.seeds = SeedCounter(self.settings.seed)
        self.body_bytes_max = body_limit(self.model.max_context)

    def check_model(self, name: str | None) -> None:
        """Raises ``ApiError`` (404) for a model that is not served here."""
        if name is not None and name not in self.names:
            there = ", ".join(map(repr, self.names))
            message = f"the model {name!r} does not exist; this server has {there}"
            raise ApiError(404, message, "model", "model_not_found")

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Around the way to a Generation, which counts its own end."""
        try:
            yield
        except PromptTooLong:
            self.metrics.on_request("too_long")
            raise
        except (ApiError, RequestError):
            self.metrics.on_request("invalid")
            raise
        except EngineDown:
            self.metrics.on_request("error")
            raise
        except ClientGone:
            self.metrics.on_request("abort")
            raise

    async def generate(self, request: Request, asked: Asked, prefix: str) -> Generation:
        """Tokenise, assemble, submit. Raises what `errors` knows an answer to, ``ClientGone`` among it."""
        self.check_model(asked.model)
        self.require_ready()
        asked = self._for_caller(asked, request.scope["headers"])
        prompts = await run_while_connected(request.receive, self.prompts(asked.source))
        work = assemble(asked, prompts, self._bounds(), prefix)
        return Generation(
            self.engine,
            work,
            self.model.eos,
            self.seeds,
            self.model.detokenizer,
            self.metrics.on_request,
        )

    async def prompts(self, source: Source) -> list[Prompt]:
        """Raises ``PromptError``, and ``ApiError`` (400) for messages that the chat template refuses."""
        try:
            return await self.encoder.encode(source)
        except (TemplateError, ModelError) as error:
            raise ApiError(400, str(error), "messages") from None

    def require_ready(self) -> Snapshot:
        """Raises ``EngineDown`` while nothing can be served."""
        self.engine.check_takes_requests()
        assert self.engine.snapshot is not None
        return self.engine.snapshot

    def spell(self, token: int) -> str:
        """One token as text, for log-probabilities."""
        return self.model.tokenizer.decode([token], skip_special=False)

    def _for_caller(self, asked: Asked, headers: Headers) -> Asked:
        """With what depends on who asks. Raises ``ApiError`` (400)."""
        highest = self.settings.priority_limit
        if highest is None and self.settings.admin_key is not None:
            highest = 0
        if highest is not None and asked.priority > highest and not self.keys.operates(headers):
            message = f"priority is {asked.priority}; at most {highest} with this key"
            raise ApiError(400, message, "priority", "invalid_value")
        return replace(asked, salt=salt(self.settings.salt_from, headers, asked.salt))

    def _bounds(self) -> Bounds:
        model = self.model
        return bounds(model.max_context, model.vocab_size, self.engine.snapshot, self.settings)
