"""How one model speaks of tools and to itself: what its prompts tell, and how its text is read.

template writes tools?   --yes--> the template's `tools`       --no--> a system message (`tools.prompting`)
calls forced, or a form  --> one grammar for the whole text    (`tools.enforced`)
text                     --> reasoning, calls, content         (`reader`)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from forebay.core.sampling import Grammar
from forebay.frontend.asked import Asked, Conversation, ToolChoice, Tools
from forebay.frontend.reader import CallParser, MessageReader
from forebay.frontend.reasoning import OPEN, ReasoningParser
from forebay.frontend.tools import MarkerEraser, ToolCallParser, ToolFormat, choose_format
from forebay.frontend.tools.enforced import calls_grammar
from forebay.frontend.tools.prompting import written_out
from forebay.models.tokenizer import Tokenizer
from forebay.settings import ReasoningParserName, Settings


@dataclass(frozen=True, slots=True)
class Dialect:
    """``template``: the chat template's text. ``special_id``: the id of a marker that is a special
    token.
    """

    format: ToolFormat
    reasons: bool
    template: str
    special_id: Callable[[str], int | None]

    def told(self, asked: Asked) -> Asked:
        """With the tools in the conversation, and markers kept in the text where calls are read
        from it.
        """
        source, tools = asked.source, asked.tools
        if not isinstance(source, Conversation):
            return asked
        shown = () if tools is None or tools.choice is ToolChoice.NONE else tools.functions
        has_calls = any("tool_calls" in message for message in source.messages)
        if shown and "tools" in self.template:
            listed = [{"type": "function", "function": function} for function in shown]
            source = replace(source, variables={**source.variables, "tools": listed})
            shown = ()
        if shown or (has_calls and "tool_calls" not in self.template):
            messages = written_out(source.messages, shown, self.format)
            source = replace(source, messages=messages)
        params = asked.params
        reads_calls = tools is not None and tools.choice is not ToolChoice.NONE
        if reads_calls and any(self.special_id(one) is not None for one in self.format.markers):
            params = params.replace(skip_special_tokens=False)
        return replace(asked, source=source, params=params)

    def grammar(self, asked: Asked) -> Grammar | None:
        """What the whole text must be. Raises ``ValueError`` where that is too long to say."""
        tools = asked.tools
        if tools is None or tools.choice is ToolChoice.NONE:
            return asked.form
        if tools.choice is ToolChoice.REQUIRED:
            return self._calls(tools, None)
        return None if asked.form is None else self._calls(tools, asked.form)

    def _calls(self, tools: Tools, answer: Grammar | None) -> Grammar:
        chosen = [one for one in tools.functions if tools.forced in (None, one["name"])]
        several = tools.parallel and tools.forced is None
        return calls_grammar(self.format, chosen, several, self.special_id, answer)

    def reader(self, asked: Asked, prompt: str | None) -> MessageReader:
        """For one sequence. ``prompt``: its text, which may have opened the reasoning."""
        reasoning = None
        if self.reasons and asked.params.grammar is None:
            reasoning = ReasoningParser(opened=(prompt or "").rstrip().endswith(OPEN))
        return MessageReader(reasoning, self._call_parser(asked.tools))

    def _call_parser(self, tools: Tools | None) -> CallParser | None:
        if tools is None:
            return None
        if tools.choice is ToolChoice.NONE:
            return MarkerEraser(self.format.markers)
        names = frozenset(str(function["name"]) for function in tools.functions)
        return ToolCallParser(self.format, names, None if tools.parallel else 1)


def dialect_of(tokenizer: Tokenizer, settings: Settings) -> Dialect:
    template = "".join(tokenizer.chat_templates.values())

    def has_token(text: str) -> bool:
        return tokenizer.token_to_id(text) is not None

    def special_id(text: str) -> int | None:
        found = tokenizer.token_to_id(text)
        return found if found in tokenizer.special_ids else None

    reasons = settings.reasoning_parser is ReasoningParserName.THINK or (
        settings.reasoning_parser is ReasoningParserName.AUTO
        and (OPEN in template or has_token(OPEN))
    )
    format = choose_format(settings.tool_call_parser.value, template, has_token)
    return Dialect(format, reasons, template, special_id)
