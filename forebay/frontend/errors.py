"""Errors as the OpenAI API words them: ``{"error": {"message", "type", "param", "code"}}`` with the right status."""

import re

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from forebay.core.messages import FinishReason
from forebay.frontend.disconnect import ClientGone
from forebay.frontend.engine import EngineDown
from forebay.frontend.generation import GenerationError
from forebay.frontend.prompts import PromptError, PromptTooLong, RequestError

RETRY_AFTER_S = "1"
CLIENT_GONE = 499
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """Ends a request with ``status`` and an error object. ``param`` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": kind,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def response(self) -> Response:
        return Response(self.body, self.status, headers=self.headers, media_type="application/json")


def as_api_error(error: RequestError | EngineDown | GenerationError) -> ApiError:
    """The API's word for what prompts, assembly and engine refuse."""
    match error:
        case PromptTooLong():
            return ApiError(400, str(error), error.field, "context_length_exceeded")
        case PromptError():
            return ApiError(400, str(error), error.field)
        case RequestError():
            return ApiError(400, str(error), error.field, "invalid_value")
        case GenerationError(reason=FinishReason.REJECTED_TOO_LONG):
            return ApiError(400, str(error), "prompt", "context_length_exceeded")
        case GenerationError(reason=FinishReason.GRAMMAR):
            return ApiError(400, str(error), "response_format", "grammar_failed")
        case GenerationError(reason=FinishReason.TAINTED):  # trying again brings the same
            return ApiError(500, str(error), code="numbers_not_finite")
        case GenerationError(reason=FinishReason.REJECTED_FULL):
            return ApiError(
                429, str(error), code="queue_full", headers={"Retry-After": RETRY_AFTER_S}
            )
        case _:
            return ApiError(
                503, str(error), code="engine_unavailable", headers={"Retry-After": RETRY_AFTER_S}
            )


def bad_body(error: Exception) -> ApiError:
    """What is wrong with a JSON body, out of what msgspec says: ``Expected `int`, got `str` - at `$.max_tokens` ``."""
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {text}")
    where = ""
    if at := re.search(r" - at (?:`key` in )?`\$\.?(.*?)`$", text):
        where, text = at[1], text[: at.start()]
    if unknown := re.search(r"unknown field `(.*)`", text):
        field = f"{where}.{unknown[1]}" if where else unknown[1]
        return ApiError(400, f"unknown field {field!r}; remove it", field, "unknown_field")
    if missing := re.search(r"missing required field `(.*)`", text):
        field = f"{where}.{missing[1]}" if where else missing[1]
        return ApiError(400, f"the field {field!r} is missing", field, "missing_field")
    text = text[:1].lower() + text[1:].replace("`", "")
    return ApiError(
        400, f"{where}: {text}" if where else f"the body: {text}", where or None, "invalid_value"
    )


def install(app: FastAPI) -> None:
    """Have ``app`` answer every error with an error object."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError | EngineDown | GenerationError)
        return as_api_error(error).response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {
            404: f"there is no route {request.url.path!r}",
            405: f"{request.url.path!r} does not take {request.method}",
        }
        if request.method == "OPTIONS" and error.status_code == 405:
            return Response(status_code=204, headers=dict(error.headers or {}))
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    async def on_client_gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)  # the server drops it: nobody is there

    async def on_bug(
        _: Request, error: Exception
    ) -> Response:  # Starlette raises it again afterwards, for the log
        return ApiError(
            500, f"internal error ({type(error).__name__}); the server's log has more"
        ).response()

    app.add_exception_handler(ApiError, on_api_error)
    for refusal in (RequestError, EngineDown, GenerationError):
        app.add_exception_handler(refusal, on_refusal)
    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
