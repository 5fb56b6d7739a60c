"""Bodies in OpenAI's forms: what each means, or the sentence with which it is refused."""

from collections.abc import Mapping
from typing import Any

from tokenmill_schemas.chat import FunctionCall, Message, TextPart, Tool, ToolCall, ToolFunction
from tokenmill_schemas.generation import ResponseFormat

Body = Mapping[str, Any]

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


TAGGED: dict[str, Any] = {
    "type": "triggered_tags", "triggers": ["<f="],
    "tags": [{"type": "tag", "begin": "<f=a>", "end": "</f>",
              "content": {"type": "json_schema", "json_schema": SCHEMA}}],
}  # fmt: skip


def chat(*messages: Any, **others: Any) -> Body:
    return {**CHAT, "messages": list(messages), **others}


def formatted(wanted: Any) -> Body:
    return {**CHAT, "response_format": wanted}


def envelope(**inner: Any) -> Body:
    return formatted(
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **inner}}
    )


def part(**given: Any) -> Body:
    return chat({"role": "user", "content": [{"type": "text", "text": "See"}, given]})


TAKEN: dict[str, tuple[Body, dict[str, Any]]] = {
    "a strict schema": (
        envelope(strict=True, description="d"),
        {"response_format": ResponseFormat(json_schema=SCHEMA, strict=True)},
    ),
    "a schema without strict": (
        envelope(), {"response_format": ResponseFormat(json_schema=SCHEMA, strict=False)},
    ),
    "strict of null": (
        envelope(strict=None), {"response_format": ResponseFormat(json_schema=SCHEMA,
            strict=False)},
    ),
    "any object": (
        formatted({"type": "json_object"}), {"response_format": ResponseFormat(json_schema={})},
    ),
    "text": (formatted({"type": "text"}), {}),
    "a schema of ours": (
        formatted({"json_schema": SCHEMA}), {"response_format": ResponseFormat(json_schema=SCHEMA)},
    ),
    "a pattern of ours": (formatted({"regex": "a+"}),
        {"response_format": ResponseFormat(regex="a+")}),
    "a choice": (formatted({"choice": ["yes", 'a "no"', "yes"]}),
        {"response_format": ResponseFormat(grammar='root ::= "yes" | "a \\"no\\""')}),
    "structural tags": (
        formatted({"type": "structural_tag", "format": TAGGED}),
        {"response_format": ResponseFormat(
            structural_tag={"type": "structural_tag", "format": TAGGED})},
    ),
    "structural tags as vLLM wrote them": (
        formatted({"type": "structural_tag", "triggers": ["<f="],
            "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}]}),
        {"response_format": ResponseFormat(
            structural_tag={"type": "structural_tag", "format": TAGGED})},
    ),
    "a developer and text parts": (
        chat(
            {"role": "developer", "content": [{"type": "text", "text": "Be "},
                {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "Hi"},
        ),
        {"messages": (
            Message("developer", (TextPart("Be "), TextPart("brief"))), Message("user", "Hi"),
        )},
    ),
    "one text part": (
        chat({"role": "user", "content": [{"type": "text", "text": "Hi"}]}),
        {"messages": (Message("user", "Hi"),)},
    ),
    "a tool's answer to its call": (
        chat(
            {"role": "user", "content": "Hi", "name": "Al"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [
                {"id": "c", "type": "function", "index": 0,
                    "function": {"name": "f", "arguments": '{"a": 1}'}},
                {"id": "d", "function": {"name": "g", "arguments": {"b": [2]}}},
                {"id": "e", "function": {"name": "h", "arguments": ""}},
            ]},
            {"role": "tool", "content": "7", "tool_call_id": "c"},
        ),
        {"messages": (
            Message("user", "Hi", name="Al"),
            Message("assistant", reasoning="Hm.", tool_calls=(
                ToolCall(FunctionCall("f", '{"a": 1}'), id="c"),
                ToolCall(FunctionCall("g", '{"b":[2]}'), id="d"),
                ToolCall(FunctionCall("h", "{}"), id="e"),
            )),
            Message("tool", "7", tool_call_id="c"),
        )},
    ),
    "variables and documents of the template": (
        {**CHAT, "chat_template_kwargs": {"enable_thinking": False},
            "documents": [{"title": "T", "text": "x"}], "add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False},
            "documents": ({"title": "T", "text": "x"},), "add_generation_prompt": False},
    ),
    "tools and a named one": (
        {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "description": "d",
            "parameters": {"type": "object"}, "strict": True}}], "parallel_tool_calls": False,
            "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": (Tool(ToolFunction("f", "d", {"type": "object"}, strict=True)),),
            "tool_choice": "function:f", "parallel_tool_calls": False},
    ),
    "no tools": ({**CHAT, "tools": [], "tool_choice": "none"}, {"tool_choice": "none"}),
    "a message to continue": (
        {**chat({"role": "assistant", "content": "H"}), "continue_final_message": True},
        {"messages": (Message("assistant", "H"),), "continue_final_message": True},
    ),
    "an answer of OpenAI's in the history": (
        chat(
            {"role": "assistant", "content": "Yes", "refusal": None, "annotations": [],
                "tool_calls": None},
            {"role": "assistant", "content": None, "refusal": "No"},
            {"role": "user", "content": "Why?"},
        ),
        {"messages": (Message("assistant", "Yes"), Message("assistant", "No"),
            Message("user", "Why?"))},
    ),
    "top_p of zero": ({**CHAT, "top_p": 0}, {"top_p": 0.0}),
    "biases by text keys": ({**CHAT, "logit_bias": {"5": -1, "7": 2.5}},
        {"logit_bias": {5: -1.0, 7: 2.5}}),
    "one stop text": ({**CHAT, "stop": "END"}, {"stop": ("END",)}),
    "several stop texts": ({**CHAT, "stop": ["a", "b", "c", "d", "e"]},
        {"stop": ("a", "b", "c", "d", "e")}),
    "the newer name of max_tokens": (
        {"messages": CHAT["messages"], "max_completion_tokens": 9, "max_tokens": 4},
            {"max_tokens": 9},
    ),
    "a prompt": ({"prompt": "Once", "max_tokens": 4}, {"prompt": "Once", "messages": None}),
    "a list of one prompt": ({"prompt": ["Once"], "max_tokens": 4},
        {"prompt": "Once", "messages": None}),
    "a prompt of token ids": ({"prompt": [1, 2], "max_tokens": 4},
        {"prompt_ids": (1, 2), "messages": None}),
}  # fmt: skip

REFUSED: dict[str, tuple[Body, str]] = {
    "an unknown key of a format": (
        formatted({"jsonschema": SCHEMA}), "response_format has the unknown key 'jsonschema'",
    ),
    "an unknown key beside a type": (
        formatted({"type": "json_object", "schema": SCHEMA}),
        "response_format has the unknown key 'schema'",
    ),
    "a schema without its envelope": (
        formatted({"type": "json_schema", "json_schema": SCHEMA}),
        "response_format.json_schema has the unknown key 'type'; "
        "it takes name, description, schema, strict",
    ),
    "an envelope without a type": (
        formatted({"json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}),
        "response_format.json_schema holds OpenAI's envelope",
    ),
    "an envelope without a schema": (
        formatted({"type": "json_schema", "json_schema": {"name": "n"}}),
        "response_format.json_schema.schema must be a JSON schema",
    ),
    "no envelope": (
        formatted({"type": "json_schema"}),
        "response_format.json_schema must be an object with name, strict and schema",
    ),
    "strict of a number": (envelope(strict=1),
        "response_format.json_schema.strict must be true or false, not 1"),
    "another type": (
        formatted({"type": "grammar"}),
        "response_format.type must be one of text, json_object, json_schema, structural_tag, not "
        "'grammar'",
    ),
    "no choice": (formatted({"choice": []}),
        "response_format.choice must be a list of texts that are not empty"),
    "a choice beside a grammar": (formatted({"choice": ["a"], "grammar": "b"}),
        "response_format has choice beside grammar: give one of them"),
    "a choice beside a pattern": (formatted({"choice": ["a"], "regex": "b"}),
        "exactly one of json_schema, regex, grammar, structural_tag, not regex and grammar"),
    "tags without a list": (formatted({"type": "structural_tag"}),
        "response_format.structures must be a list of tags, each with begin, schema and end"),
    "both forms of tags": (
        formatted({"type": "structural_tag", "format": TAGGED, "triggers": []}),
        "response_format.format must be an object, without structures and triggers",
    ),
    "a format that is a text": (formatted("json"), "response_format must be an object"),
    "an unknown key of a message": (
        chat({"role": "user", "content": "Hi", "weight": 1}),
        "messages[0] has the unknown key 'weight'",
    ),
    "a tool that is no function": ({**CHAT, "tools": [{"type": "web_search"}]},
        "tools[0] must be a function, with a name and parameters"),
    "two tools of one name": (
        {**CHAT, "tools": [TOOL, TOOL]}, "tools[1].function.name is 'f', which another tool has",
    ),
    "an unknown tool in the choice": (
        {**CHAT, "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice names 'g', which is no tool",
    ),
    "a call that is required of no tool": ({**CHAT, "tool_choice": "required"},
        "tool_choice is 'required', but there are no tools"),
    "a tool of no object": (
        {**CHAT, "tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters must be the JSON schema of an object",
    ),
    "a name with a blank": ({**CHAT, "tools": [{"function": {"name": "f g"}}]},
        "tools[0].function.name must have 1 to 64 letters, digits, '_', '.' or '-', not 'f g'"),
    "too many tools": ({**CHAT, "tools": [TOOL] * 10_000},
        "tools may have 128 entries, not 10000"),
    "tools beside a format": (
        {**CHAT, "tools": [TOOL], "response_format": {"regex": "[0-9]+"}},
        "response_format cannot be given together with tools, unless it is a json_schema",
    ),
    "a call without a function": (
        chat({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}),
        "messages[0].tool_calls[0] must be the call of a function, with name and arguments",
    ),
    "arguments that are no object": (
        chat({"role": "assistant",
              "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}),
        "messages[0].tool_calls[0].function.arguments must be a JSON object",
    ),
    "an answer to no call": (
        chat({"role": "tool", "content": "7", "tool_call_id": "c"}),
        "messages[0].tool_call_id is 'c', which no message before it called",
    ),
    "a user's call": (
        chat({"role": "user", "content": "Hi", "tool_calls": [{"function": {"name": "f"}}]}),
        "messages[0].tool_calls is an assistant's only",
    ),
    "an assistant without content and calls": (
        chat({"role": "assistant", "content": None}),
        "messages[0].content must be a text or a list of text parts",
    ),
    "a name that is no text": (chat({"role": "user", "content": "Hi", "name": 7}),
        "messages[0].name must be a text"),
    "both ways to go on": (
        {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message continues the final message, and add_generation_prompt begins",
    ),
    "another role": (
        chat({"role": "wizard", "content": "Hi"}),
        "messages[0].role must be one of developer, system, user, assistant, tool, not 'wizard'",
    ),
    "no content": (
        chat({"role": "user"}), "messages[0].content must be a text or a list of text parts",
    ),
    "a refusal of the user": (
        chat({"role": "user", "content": "Hi", "refusal": "No"}),
        "messages[0].refusal is an assistant's only",
    ),
    "an image": (
        part(type="image_url", image_url={"url": "data:"}),
        "messages[0].content[1] is a part of type 'image_url'; only text parts are supported",
    ),
    "audio": (
        part(type="input_audio", input_audio={"data": "", "format": "wav"}),
        "messages[0].content[1] is a part of type 'input_audio'; only text parts are supported",
    ),
    "a part without a type": (
        part(text="Hi"),
        "messages[0].content[1] is a part without a type; only text parts are supported",
    ),
    "an unknown key of a part": (
        part(type="text", text="Hi", cache_control={"type": "ephemeral"}),
        "messages[0].content[1] has the unknown key 'cache_control'",
    ),
    "a part without its text": (part(type="text"), "messages[0].content[1].text must be a text"),
    "a message that is a text": (chat("Hi"), "messages[0] must be a message with role and content"),
    "no messages": (chat(), "messages is empty; it needs at least one message"),
    "a bias that is a text": (
        {**CHAT, "logit_bias": {"5": "1"}}, "logit_bias must be a map from token ids to numbers",
    ),
    "a bias of a word": ({**CHAT, "logit_bias": {"dog": 1}},
        "logit_bias must be a map from token ids to numbers"),
    "too many stop texts": ({**CHAT, "stop": ["a"] * 17}, "stop may have 16 strings, not 17"),
    "a stop that is a map": ({**CHAT, "stop": {"a": 1}}, "stop must be a text or a list of texts"),
    "several prompts": (
        {"prompt": ["a", "b"], "max_tokens": 4},
        "prompt must be one text or one list of token ids; several prompts are several jobs",
    ),
    "top_p above one": ({**CHAT, "top_p": 1.5}, "top_p must be from 0 to 1, not 1.5"),
}  # fmt: skip
