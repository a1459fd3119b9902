"""`POST /tokenize` and `POST /detokenize`: the model's tokenizer over HTTP, as vLLM words it."""

from starlette.requests import Request
from starlette.responses import Response

from forebay.frontend.disconnect import run_while_connected
from forebay.frontend.limits import read_body
from forebay.frontend.parse import parse_tokenize
from forebay.frontend.protocol import DetokenizeRequest, decode_body
from forebay.frontend.responses import json_body
from forebay.frontend.service import Service


async def tokenize(service: Service, request: Request) -> Response:
    source, model = parse_tokenize(await read_body(request, service.body_bytes_max))
    service.check_model(model)
    (prompt,) = await run_while_connected(request.receive, service.prompts(source))
    answer = {
        "count": len(prompt.tokens),
        "max_model_len": service.model.max_context,
        "tokens": prompt.tokens,
    }
    return Response(json_body(answer), media_type="application/json")


async def detokenize(service: Service, request: Request) -> Response:
    asked = decode_body(await read_body(request, service.body_bytes_max), DetokenizeRequest)
    service.check_model(asked.model)
    text = await run_while_connected(request.receive, service.encoder.decode(asked.tokens))
    return Response(json_body({"prompt": text}), media_type="application/json")
