"""`POST /tokenize` and `POST /detokenize`: the model's tokenizer over HTTP, as vLLM words it."""

from starlette.requests import Request
from starlette.responses import Response

from forebay.frontend.chat import conversation_prompt
from forebay.frontend.disconnect import run_while_connected
from forebay.frontend.errors import ApiError
from forebay.frontend.limits import read_body
from forebay.frontend.prompts import Prompt
from forebay.frontend.protocol import DetokenizeRequest, TokenizeRequest, decode_body
from forebay.frontend.responses import json_body
from forebay.frontend.service import Service


async def tokenize(service: Service, request: Request) -> Response:
    asked = decode_body(await read_body(request, service.body_bytes_max), TokenizeRequest)
    if asked.model is not None:
        service.check_model(asked.model)
    prompt = await run_while_connected(request.receive, _prompt(service, asked))
    answer = {
        "count": len(prompt.tokens),
        "max_model_len": service.model.max_context,
        "tokens": prompt.tokens,
    }
    return Response(json_body(answer), media_type="application/json")


async def detokenize(service: Service, request: Request) -> Response:
    asked = decode_body(await read_body(request, service.body_bytes_max), DetokenizeRequest)
    if asked.model is not None:
        service.check_model(asked.model)
    text = await run_while_connected(request.receive, service.encoder.decode(asked.tokens))
    return Response(json_body({"prompt": text}), media_type="application/json")


async def _prompt(service: Service, asked: TokenizeRequest) -> Prompt:
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if asked.messages is not None:
        if asked.add_special_tokens is not None:
            raise ApiError(
                400, "add_special_tokens goes with prompt, not with messages", "add_special_tokens"
            )
        return await conversation_prompt(
            service, asked.messages, asked.add_generation_prompt is not False
        )
    assert asked.prompt is not None
    if asked.add_generation_prompt is not None:
        raise ApiError(400, "add_generation_prompt goes with messages", "add_generation_prompt")
    return await service.encoder.from_text(asked.prompt, asked.add_special_tokens is not False)
