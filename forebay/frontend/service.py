"""What every HTTP route works on: one engine, one model, and the way from a checked request to a running Generation."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request

from forebay.core.messages import Snapshot
from forebay.core.sampling import Grammar, GrammarKind
from forebay.frontend.asked import Asked, Source
from forebay.frontend.assemble import Bounds, assemble, bounds
from forebay.frontend.auth import Headers, Keys, salt
from forebay.frontend.dialect import dialect_of
from forebay.frontend.disconnect import ClientGone, run_while_connected
from forebay.frontend.engine import Engine, EngineDown
from forebay.frontend.errors import ApiError
from forebay.frontend.generation import Generation
from forebay.frontend.grammar_check import GrammarBusy, GrammarCheck
from forebay.frontend.limits import body_limit
from forebay.frontend.model import ServedModel
from forebay.frontend.parse_tools import form_field
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
        self.dialect = dialect_of(self.model.tokenizer, self.settings)
        self.grammars = GrammarCheck(self.model.tokenizer.path, self.settings.grammar_timeout_s)

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
        """Compile, tokenise, assemble, submit. Raises what `errors` knows an answer to, ``ClientGone`` among it."""
        self.check_model(asked.model)
        self.require_ready()
        asked = self._for_caller(asked, request.scope["headers"])
        asked = await run_while_connected(request.receive, self._constrained(asked))
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

    async def _constrained(self, asked: Asked) -> Asked:
        """With tools told and the grammar that enforces what was asked. Raises ``ApiError`` (400, 503)."""
        try:
            grammar = self.dialect.grammar(asked)
        except ValueError as error:
            raise ApiError(400, f"tools: {error}", "tools", "invalid_value") from None
        asked = self.dialect.told(asked)
        if grammar is None:
            return asked
        if problem := await self._problem(grammar):
            field, problem = await self._blame(asked, problem)
            raise ApiError(400, f"{field} cannot be enforced: {problem}", field, "invalid_value")
        return replace(asked, params=asked.params.replace(grammar=grammar))

    async def _blame(self, asked: Asked, problem: str) -> tuple[str, str]:
        """The field whose grammar does not compile, and why."""
        if asked.form is not None and (why := await self._problem(asked.form)):
            return form_field(asked.form), why
        for number, function in enumerate(asked.tools.functions if asked.tools else ()):
            schema = msgspec.json.encode(function["parameters"]).decode()
            if why := await self._problem(Grammar(GrammarKind.JSON_SCHEMA, schema)):
                return f"tools[{number}].function.parameters", why
        return "tools", problem

    async def _problem(self, grammar: Grammar) -> str:
        try:
            return await self.grammars.problem(grammar)
        except GrammarBusy as error:
            raise ApiError(
                503, str(error), code="overloaded", headers={"Retry-After": "1"}
            ) from None

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
