"""A prompt as part of an answer: its text, and what the model thought of each of its tokens."""

from forebay.core.messages import TokenLogprobs
from forebay.frontend.prompts import Prompt
from forebay.frontend.sequence import Detokenizer, Position


def prompt_positions(
    prompt: Prompt, scores: dict[int, TokenLogprobs], detokenizer: Detokenizer
) -> list[Position]:
    """One for each token of the prompt; the first has no log-probabilities. ``scores``: by position, from 1 on."""
    found: list[Position] = []
    offset = 0
    last = len(prompt.tokens) - 1
    for index, token in enumerate(prompt.tokens):
        text = detokenizer.push([token])
        if index == last:
            text += detokenizer.finish()
        found.append(Position(token, offset, scores[index] if index else None, text))
        offset += len(text)
    return found


def echo_text(prompt: Prompt, detokenizer: Detokenizer) -> str:
    """The prompt as it was given, or the text of its tokens."""
    if prompt.text is not None:
        return prompt.text
    return detokenizer.push(prompt.tokens) + detokenizer.finish()
