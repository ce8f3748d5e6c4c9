"""What each field of a request's body means, and what holds where it is not given.

For /openapi.json and the reference. Every field that works has a text; a test says so. Knows the
bodies, and nothing of how they are answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipeinfer.gateway.anthropic import CountRequest, MessagesRequest
from pipeinfer.gateway.responses_api import InputTokensRequest, ResponsesRequest
from pipeinfer.gateway.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)


class FieldHelp(NamedTuple):
    """What a field means, and what holds without it.

    Attributes:
    - text: Markdown, without links
    - default: value without the field, if any; "required" where a body is wrong without it
    """

    text: str
    default: str = ""

    def description(self) -> str:
        """Both, as one text."""
        if not self.default:
            return self.text
        word = "Required." if self.default == "required" else f"Default: {self.default}."
        return f"{self.text} {word}"


_FORM = "The form of the answer, as {} says it: {}"

MODEL = {"model": FieldHelp("The name of the model. Another name than the served one gets 404.")}
SAMPLING_FIELDS = {
    "stream": FieldHelp("Whether the answer comes as server-sent events.", "false"),
    "temperature": FieldHelp(
        "How even the choice among tokens is. 0 is greedy. At most 100.",
        "the checkpoint's generation_config.json, else 1.0",
    ),
    "top_p": FieldHelp(
        "The likeliest tokens are kept whose probabilities add up to this.",
        "the checkpoint's, else 1.0",
    ),
    "top_k": FieldHelp(
        "So many of the likeliest tokens are kept. 0 or -1 keeps all.", "the checkpoint's, else 0"
    ),
    "seed": FieldHelp(
        "Any 64-bit integer. The same seed gives the same noise at each position. Choice `i` has "
        "`seed + i`.",
        "drawn by the server",
    ),
    "priority": FieldHelp("Requests with lower numbers are served earlier.", "0"),
    "timeout": FieldHelp(
        "Seconds after which the request ends. More than 0 and at most a day.",
        "`--request-timeout`",
    ),
    "cache_salt": FieldHelp(
        "The request shares cached prefixes only with requests of the same salt. At most 1,024 "
        "letters.",
        "empty",
    ),
    "extra_key": FieldHelp(
        "SGLang's second salt. With both, requests share prefixes only where both are the same.",
        "empty",
    ),
}
PENALTIES = {
    "presence_penalty": FieldHelp(
        "In [-2, 2]. Taken once off the logit of every token that the output holds.", "0.0"
    ),
    "frequency_penalty": FieldHelp(
        "In [-2, 2]. Taken off the logit of a token as often as the output holds it.", "0.0"
    ),
}
TEMPLATE = {
    "chat_template_kwargs": FieldHelp(
        'Further variables of the chat template, for example `{"enable_thinking": false}`.', "none"
    ),
}
GENERATION: dict[str, FieldHelp] = {
    **MODEL,
    **SAMPLING_FIELDS,
    **PENALTIES,
    "stream_options": FieldHelp(
        "Only with `stream`. `include_usage`: one more event has the usage. "
        "`continuous_usage_stats`: every event has the usage so far, without what the cache had.",
        "none",
    ),
    "min_p": FieldHelp(
        "Tokens are kept that are at least this share as likely as the likeliest.",
        "the checkpoint's, else 0.0",
    ),
    "repetition_penalty": FieldHelp(
        "In [0.01, 100]. The logit of what prompt or output hold is divided by it where the logit "
        "is positive, else multiplied.",
        "the checkpoint's, else 1.0",
    ),
    "max_tokens": FieldHelp(
        "The most output tokens.", "16 for completions; as many as fit for chats"
    ),
    "max_new_tokens": FieldHelp("The same, as SGLang calls it. `max_tokens` goes before it."),
    "min_tokens": FieldHelp(
        "No stop token is sampled, and no stop string counts, before so many output tokens.", "0"
    ),
    "stop": FieldHelp(
        "A text, or up to 16 of at most 1,024 letters each, that ends the answer. It is not part "
        "of the answer.",
        "none",
    ),
    "stop_token_ids": FieldHelp(
        "Up to 1,024 ids that end the answer, beside the model's own.", "none"
    ),
    "logit_bias": FieldHelp(
        "At most 1,024 token ids, each with a number in [-100, 100] that is added to its logit "
        "before penalties and temperature. What `min_tokens` holds back stays held back.",
        "none",
    ),
    "allowed_token_ids": FieldHelp(
        "Up to 1,024 ids. No other is sampled, not even an id that ends the answer.", "all ids"
    ),
    "bad_words": FieldHelp(
        "Up to 128 texts of at most 64 letters that the answer must not have. Each is tokenized as "
        "it is and with a space before it. A word that is spelled with other tokens, or that "
        "begins amid a token, is not found.",
        "none",
    ),
    "truncate_prompt_tokens": FieldHelp(
        "So many of the prompt's last tokens are kept. -1 keeps as many as leave room for "
        "`max_tokens`, or for one token.",
        "all are kept",
    ),
    "truncation_side": FieldHelp(
        "With `right`, `truncate_prompt_tokens` keeps the first tokens instead.", "`left`"
    ),
    "ignore_eos": FieldHelp("The model's own end does not end the answer.", "false"),
    "skip_special_tokens": FieldHelp("Special tokens have no text.", "true"),
    "include_stop_str_in_output": FieldHelp("The stop string belongs to the answer.", "false"),
    "prompt_logprobs": FieldHelp(
        "Log-probs of the prompt's tokens with so many alternatives, 0 to 20, in vLLM's form. Not "
        "with `stream`.",
        "none",
    ),
    "add_special_tokens": FieldHelp(
        "Lets the tokenizer add BOS and the like. In chats the template has written them.",
        "true for completions",
    ),
    "return_token_ids": FieldHelp(
        "Choices have the ids of the output as `token_ids`, and answers those of the prompt as "
        "`prompt_token_ids`. The token that ended the answer is not among them.",
        "false",
    ),
    "n": FieldHelp("Choices of each prompt, at most 128; of a body at most `--max-prompts`.", "1"),
    "thinking_token_budget": FieldHelp(
        "The most tokens of thoughts, between `<think>` and `</think>` or the model's own tags. "
        "Then the model is made to go on with its answer. Not with `allowed_token_ids` or "
        "`bad_words`, and not where `continue_final_message` goes on amid thoughts. -1 is "
        "none.",
        "without limit",
    ),
    "response_format": FieldHelp(
        'The form of the answer: `{"type": "json_object"}`, or `{"type": "json_schema", '
        '"json_schema": {"schema": {...}}}`. A `schema` may also stand beside either `type`.',
        "text",
    ),
    "structured_outputs": FieldHelp(
        _FORM.format(
            "vLLM", "an object with one of `json`, `json_object`, `regex`, `choice`, `grammar`."
        ),
        "none",
    ),
    "guided_json": FieldHelp(_FORM.format("older vLLM", "a JSON schema."), "none"),
    "guided_regex": FieldHelp(_FORM.format("older vLLM", "a regular expression."), "none"),
    "guided_choice": FieldHelp(_FORM.format("older vLLM", "one of these texts."), "none"),
    "guided_grammar": FieldHelp(_FORM.format("older vLLM", "a grammar in Lark or GBNF."), "none"),
    "regex": FieldHelp(_FORM.format("SGLang", "a regular expression."), "none"),
    "ebnf": FieldHelp(_FORM.format("SGLang", "a grammar in GBNF."), "none"),
    "json_schema": FieldHelp(_FORM.format("SGLang", "a JSON schema."), "none"),
    "grammar": FieldHelp(_FORM.format("llama.cpp", "a grammar in GBNF."), "none"),
    "format": FieldHelp(_FORM.format("Ollama", '`"json"`, or a schema.'), "none"),
}
CHAT: dict[str, FieldHelp] = {
    **GENERATION,
    **TEMPLATE,
    "messages": FieldHelp(
        "The conversation. Roles are `system`, `developer` (becomes `system`), `user`, "
        "`assistant`, `tool` and `function`. Content is a text, or a list of parts of type `text` "
        "or `refusal`. Thoughts are `reasoning_content`, `reasoning` or `thinking`.",
        "required",
    ),
    "logprobs": FieldHelp("The log-prob of each output token.", "false"),
    "top_logprobs": FieldHelp(
        "So many of the likeliest tokens at each position, 0 to 20. Only with `logprobs`.", "0"
    ),
    "max_completion_tokens": FieldHelp("The most output tokens. Goes before `max_tokens`."),
    "add_generation_prompt": FieldHelp("Whether the template opens the assistant's turn.", "true"),
    "tools": FieldHelp(
        "Up to 128 tools that the model may call. Functions: "
        '`{"type": "function", "function": {"name", "description", "parameters"}}`. Custom tools, '
        'which take a text: `{"type": "custom", "custom": {"name", "description", "format"}}`, '
        'with a format `{"type": "text"}` or `{"type": "grammar", "grammar": {"syntax", '
        '"definition"}}` of the syntax `lark` or `regex`. Other types are refused.',
        "none",
    ),
    "tool_choice": FieldHelp(
        "`auto`: the model is free. `none`: the model is not shown any. `required`: it calls "
        'at least one. `{"type": "function", "function": {"name": "..."}}`, or the same with '
        '`custom`: it calls that one, once. `{"type": "allowed_tools", "allowed_tools": {"mode": '
        '"auto" or "required", "tools": [{"type": "function", "function": {"name": "..."}}]}}`: it '
        "is shown all tools and calls those alone.",
        "`auto` with `tools`",
    ),
    "parallel_tool_calls": FieldHelp("With false, only the first call is told.", "true"),
    "include_reasoning": FieldHelp("With false, thoughts are left out.", "true"),
    "enable_thinking": FieldHelp(
        "Given to the chat template under this name. `chat_template_kwargs` goes before it.", "none"
    ),
    "reasoning_effort": FieldHelp(
        "Given to the chat template under this name. `none` also says `enable_thinking: false`. "
        "At most 64 letters. gpt-oss knows `low`, `medium` and `high`, and refuses others.",
        "none",
    ),
    "documents": FieldHelp(
        "Objects that the chat template is given. Some templates show them to the model.", "none"
    ),
    "chat_template": FieldHelp(
        "A Jinja template of at most 65,536 letters, in place of the model's. Refused without "
        "`--trust-request-chat-template`.",
        "the model's",
    ),
    "continue_final_message": FieldHelp(
        "The last message, an assistant's, is left open and goes on. Only with "
        "`add_generation_prompt: false`. The answer has what is new.",
        "false",
    ),
    "functions": FieldHelp(
        "OpenAI's older way of saying `tools`: a list of `name`, `description`, `parameters`. "
        "Refused beside `tools` and `tool_choice`.",
        "none",
    ),
    "function_call": FieldHelp(
        'The same for `tool_choice`: `none`, `auto` or `{"name": "..."}`.', "`auto`"
    ),
}
COMPLETION: dict[str, FieldHelp] = {
    **GENERATION,
    "prompt": FieldHelp(
        "A text, a list of token ids, or a list of at most `--max-prompts` of either. Each prompt "
        "gives `n` choices, one prompt after the other.",
        "required",
    ),
    "logprobs": FieldHelp(
        "The log-prob of each token, with so many alternatives, 0 to 20. False is as not given.",
        "none",
    ),
    "echo": FieldHelp(
        "The prompt comes before the output, and its log-probs before those of the output. With it "
        "`max_tokens` may be 0.",
        "false",
    ),
    "best_of": FieldHelp(
        "So many choices are made, and the `n` best of them shown: those with the highest mean "
        "log-prob of a token. Above `n` not with `stream`.",
        "`n`",
    ),
}
_ECHOED = FieldHelp("Comes back as it is, and changes nothing.")
RESPONSES: dict[str, FieldHelp] = {
    **MODEL,
    **SAMPLING_FIELDS,
    **PENALTIES,
    **TEMPLATE,
    **{
        name: GENERATION[name]
        for name in (
            "min_p",
            "repetition_penalty",
            "logit_bias",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "include_stop_str_in_output",
            "structured_outputs",
        )
    },
    "include_reasoning": CHAT["include_reasoning"],
    "input": FieldHelp(
        "A text, or a list of items: messages with a text or parts `input_text`, `output_text` and "
        "`refusal`; `function_call`, `custom_tool_call` and the same with `_output`; `reasoning`. "
        "The `output` of an answer may be put there as it is.",
        "required",
    ),
    "instructions": FieldHelp(
        "A system message before all others. System messages that follow each other become one.",
        "none",
    ),
    "max_output_tokens": FieldHelp("The most output tokens, thoughts included.", "as many as fit"),
    "tools": FieldHelp(
        'Functions: `{"type": "function", "name", "description", "parameters"}`. Custom tools: '
        '`{"type": "custom", "name", "description", "format"}` with a format `{"type": "text"}` or '
        '`{"type": "grammar", "syntax", "definition"}`. Built-in tools are refused.',
        "none",
    ),
    "tool_choice": FieldHelp(
        'As for chats. A tool that must be called is `{"type": "function", "name": "..."}`, or the '
        'same with `custom`. `{"type": "allowed_tools", "mode", "tools": [{"type": "function", '
        '"name": "..."}]}`: those alone are called.',
        "`auto`",
    ),
    "parallel_tool_calls": CHAT["parallel_tool_calls"],
    "max_tool_calls": FieldHelp(
        "At least 1. It bounds calls of built-in tools, of which there are none, and comes back as "
        "it is.",
        "none",
    ),
    "text": FieldHelp(
        "`format` is the form of the answer: `text`, `json_object`, or `json_schema` with `name` "
        "and `schema`. `verbosity` changes nothing, and comes back.",
        "none",
    ),
    "truncation": FieldHelp(
        "With `auto`, of a conversation that does not fit as few of the first turns are left out "
        "as it takes. What system and developer say, and the last turn, stay. With `disabled` it "
        "gets 400.",
        "`disabled`",
    ),
    "reasoning": FieldHelp(
        "`effort` is handed to the chat template as `reasoning_effort`, with `enable_thinking` "
        "true. `none` gives the template `enable_thinking` false.",
        "none",
    ),
    "include": FieldHelp(
        "`message.output_text.logprobs` asks for log-probs. `reasoning.encrypted_content` is "
        "taken, and there is none.",
        "none",
    ),
    "top_logprobs": FieldHelp("Alternatives of each token's log-prob, 0 to 20.", "0"),
    "stream_options": FieldHelp("Changes nothing: the last event always has the usage.", "none"),
    "store": FieldHelp("Nothing is stored, and the answer says false."),
    "metadata": _ECHOED,
    "user": _ECHOED,
    "safety_identifier": _ECHOED,
    "prompt_cache_key": _ECHOED,
}
INPUT_TOKENS: dict[str, FieldHelp] = {
    name: RESPONSES[name]
    for name in (
        *MODEL,
        *TEMPLATE,
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "text",
        "reasoning",
        "truncation",
    )
}
COUNT: dict[str, FieldHelp] = {
    **MODEL,
    **TEMPLATE,
    "messages": FieldHelp(
        "Turns of `user`, `assistant` and `system`: a text, or blocks `text`, `document` (of plain "
        "text) and `tool_result` (of the user), `thinking` and `tool_use` (of the assistant). "
        "`redacted_thinking`, `signature`, `is_error` and `cache_control` are taken and say "
        "nothing. A last turn of the assistant goes on from the end of its text: such an answer "
        "has no calls, and no form.",
        "required",
    ),
    "system": FieldHelp("A text or blocks of text, before all messages.", "none"),
    "tools": FieldHelp(
        'A list of `{"name", "description", "input_schema"}`. Tools of Anthropic\'s servers are '
        "refused.",
        "none",
    ),
    "tool_choice": FieldHelp(
        '`{"type": "auto"}`, `none`, `any` or `tool` with a `name`. `disable_parallel_tool_use`: '
        "only the first call is told.",
        "`auto`",
    ),
    "thinking": FieldHelp(
        '`{"type": "enabled"}`, `adaptive` or `disabled` is the template\'s `enable_thinking`. '
        "`budget_tokens` bounds thoughts. `display`: `summarized` shows all thoughts, with "
        "`omitted` their blocks are empty.",
        "the template's",
    ),
    "output_config": FieldHelp(
        "`effort` is handed to the chat template as `reasoning_effort`, to that of gpt-oss the "
        "nearest one that it knows. `format`, "
        '`{"type": "json_schema", "schema"}`, is the form of the answer.',
        "none",
    ),
}
MESSAGES: dict[str, FieldHelp] = {
    **COUNT,
    **SAMPLING_FIELDS,
    "max_tokens": FieldHelp("The most output tokens, thoughts included.", "required"),
    "stop_sequences": GENERATION["stop"],
    "metadata": FieldHelp("Is taken, and changes nothing."),
}
TOKENIZE: dict[str, FieldHelp] = {
    **MODEL,
    **TEMPLATE,
    "prompt": FieldHelp("A text. Either it or `messages` is given."),
    "messages": FieldHelp("A chat, rendered by the chat template."),
    "return_token_strs": FieldHelp(
        "`token_strs` has the tokens as the vocabulary writes them.", "false"
    ),
    "add_special_tokens": FieldHelp(
        "Lets the tokenizer add BOS and the like.", "true for a `prompt`"
    ),
    **{
        name: CHAT[name]
        for name in (
            "add_generation_prompt",
            "tools",
            "tool_choice",
            "chat_template",
            "continue_final_message",
            "documents",
            "enable_thinking",
            "reasoning_effort",
            "functions",
            "function_call",
        )
    },
}
DETOKENIZE: dict[str, FieldHelp] = {
    **MODEL,
    "tokens": FieldHelp("Token ids; as many as the body can hold.", "required"),
    "skip_special_tokens": FieldHelp("Special tokens have no text.", "false"),
}

BY_BODY: Mapping[type[Body], Mapping[str, FieldHelp]] = {
    ChatRequest: CHAT,
    CompletionRequest: COMPLETION,
    ResponsesRequest: RESPONSES,
    InputTokensRequest: INPUT_TOKENS,
    MessagesRequest: MESSAGES,
    CountRequest: COUNT,
    TokenizeRequest: TOKENIZE,
    DetokenizeRequest: DETOKENIZE,
}
