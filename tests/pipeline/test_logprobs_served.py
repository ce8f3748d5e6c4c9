"""Log-probs as OpenAI's client reads them: chats and completions, whole, streamed and echoed."""

from __future__ import annotations

import json

import openai
import pytest

QUESTION = [{"role": "user", "content": "Count from 3 to 9."}]
PROMPT = "<|im_start|>user\nCount from 3 to 9.<|im_end|>\n<|im_start|>assistant\n"
MODEL = "pipeinfer-demo"


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
        yield client


def chat(api: openai.OpenAI, **more):
    usual = {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    return api.chat.completions.create(model=MODEL, messages=QUESTION, **(usual | more))


def complete(api: openai.OpenAI, **more):
    usual = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 3}
    return api.completions.create(model=MODEL, **(usual | more))


def test_a_chats_tokens_say_how_likely_they_were(api):
    choice = chat(api).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    for token in tokens:
        assert bytes(token.bytes).decode() == token.token
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert token.top_logprobs[0].token == token.token, "it is greedy"
        assert token.logprob == tops[0] <= 0
    assert chat(api, logprobs=False, top_logprobs=0).choices[0].logprobs is None
    assert all(not t.top_logprobs for t in chat(api, top_logprobs=0).choices[0].logprobs.content)


def test_a_stream_carries_the_same_log_probs_beside_its_text(api):
    whole = chat(api).choices[0]
    chunks = [c.choices[0] for c in chat(api, stream=True) if c.choices]
    tokens = [t for c in chunks if c.logprobs is not None for t in c.logprobs.content]
    assert tokens == whole.logprobs.content
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content
    for chunk in chunks:
        if chunk.logprobs is not None:
            said = "".join(token.token for token in chunk.logprobs.content)
            assert said == chunk.delta.content


def test_tokens_of_a_stop_string_have_entries_although_their_text_is_held_back(api):
    whole = chat(api, max_tokens=40).choices[0]
    stop = whole.message.content[4:7]
    cut = chat(api, stop=stop, stream=True, max_tokens=40)
    chunks = [c.choices[0] for c in cut if c.choices]
    tokens = [t for c in chunks if c.logprobs is not None for t in c.logprobs.content]
    text = "".join(c.delta.content or "" for c in chunks)
    said = "".join(token.token for token in tokens)
    assert text == whole.message.content.partition(stop)[0]
    assert said.startswith(text) and stop in said
    assert tokens == whole.logprobs.content[: len(tokens)]
    assert tokens == chat(api, stop=stop, max_tokens=40).choices[0].logprobs.content


def test_a_completion_has_lists_by_token(api):
    choice = complete(api).choices[0]
    said = choice.logprobs
    assert "".join(said.tokens) == choice.text
    assert len(said.tokens) == len(said.token_logprobs) == len(said.text_offset) == 12
    for token, own, top, place in zip(
        said.tokens, said.token_logprobs, said.top_logprobs, said.text_offset, strict=True
    ):
        assert len(top) == 3 and top[token] == own == max(top.values())
        assert choice.text[place:].startswith(token)
    chunks = [c.choices[0] for c in complete(api, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        listed = [v for c in chunks if c.logprobs is not None for v in getattr(c.logprobs, name)]
        assert listed == getattr(said, name)


def test_an_echo_gives_the_prompt_and_the_output_together(api):
    plain, echoed = complete(api).choices[0], complete(api, echo=True).choices[0]
    assert echoed.text == PROMPT + plain.text
    said = echoed.logprobs
    prompt = len(said.tokens) - 12
    assert said.token_logprobs[0] is None and said.top_logprobs[0] is None
    assert all(value <= 0 for value in said.token_logprobs[1:])
    assert "".join(said.tokens) == PROMPT + plain.text
    assert said.tokens[prompt:] == plain.logprobs.tokens
    assert said.token_logprobs[prompt:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    offsets = [len(PROMPT) + place for place in plain.logprobs.text_offset]
    assert said.text_offset[prompt:] == offsets
    assert said.text_offset[:prompt] == sorted(said.text_offset[:prompt])
    assert complete(api, echo=True, logprobs=None).choices[0].text == echoed.text


def test_an_echo_is_streamed_before_the_output(api):
    whole = complete(api, echo=True).choices[0]
    first, *others = [c.choices[0] for c in complete(api, echo=True, stream=True)]
    assert first.text == PROMPT
    assert first.text + "".join(c.text for c in others) == whole.text
    for name in ("tokens", "token_logprobs", "text_offset"):
        every = [first, *(c for c in others if c.logprobs is not None)]
        assert [v for c in every for v in getattr(c.logprobs, name)] == getattr(
            whole.logprobs, name
        )


@pytest.mark.parametrize("stream", [False, True])
def test_the_likelihood_of_a_text_is_asked_for_with_an_echo_and_no_tokens(api, stream):
    """As lm-eval does, with ids or a text; several at a time."""
    ids = [72, 105, 32, 116, 104, 101, 114, 101]
    asked = {"prompt": [ids, ids[:3]], "max_tokens": 0, "logprobs": 1, "echo": True}
    if stream:
        chunks = list(complete(api, **asked, stream=True,
                                      stream_options={"include_usage": True}))  # fmt: skip
        usage = chunks[-1].usage
        found = [[c.choices[0] for c in chunks if c.choices and c.choices[0].index == n]
                 for n in (0, 1)]  # fmt: skip
        assert [[c.finish_reason for c in some] for some in found] == [[None, "length"]] * 2
        assert [[c.text for c in some] for some in found] == [["Hi there", ""], ["Hi ", ""]]
        said = [some[0].logprobs for some in found]
    else:
        answer = complete(api, **asked)
        usage, said = answer.usage, [choice.logprobs for choice in answer.choices]
        assert [choice.text for choice in answer.choices] == ["Hi there", "Hi "]
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (usage.completion_tokens, usage.prompt_tokens) == (0, 11)
    for one, many in zip(said, (8, 3), strict=True):
        assert "".join(one.tokens) == "Hi there"[:many]
        assert one.token_logprobs[0] is None and len(one.token_logprobs) == many
        assert all(value < 0 for value in one.token_logprobs[1:])
        assert one.text_offset == list(range(many))
    assert said[0].token_logprobs[1:3] == pytest.approx(said[1].token_logprobs[1:], abs=1e-4)


def test_a_prompts_log_probs_are_vllms(api):
    answer = complete(api, prompt=[72, 105, 33], logprobs=None, max_tokens=2,
                      extra_body={"prompt_logprobs": 2})  # fmt: skip
    first, *others = answer.choices[0].model_extra["prompt_logprobs"]
    assert first is None and len(others) == 2
    for token, listed in zip((105, 33), others, strict=True):
        assert str(token) in listed and len(listed) in (2, 3)
        own = listed[str(token)]
        assert own["decoded_token"] == chr(token) and own["logprob"] < 0 and own["rank"] >= 1
        assert [one["rank"] for one in listed.values() if one is not own][:2] in ([1], [1, 2], [2])
    answer = chat(api, logprobs=False, top_logprobs=0, extra_body={"prompt_logprobs": 0})
    listed = answer.model_extra["prompt_logprobs"]
    assert len(listed) == answer.usage.prompt_tokens and listed[0] is None
    assert all(len(one) == 1 for one in listed[1:])


def test_a_character_of_several_tokens_is_written_as_openai_does(api):
    """Tokens that are a part of a character have their bytes, and texts that say these."""
    ids = [*"é".encode(), 65]
    answer = complete(api, prompt=ids, max_tokens=0, echo=True, logprobs=0)
    said = answer.choices[0].logprobs
    assert said.tokens == ["bytes:\\xc3", "bytes:\\xa9", "A"]
    assert answer.choices[0].text == "éA" and said.text_offset == [0, 0, 1]
    biased = {"logit_bias": {"195": 100}, "max_tokens": 1, "logprobs": True}
    token = chat(api, **biased).choices[0].logprobs.content[0]
    assert (token.token, token.bytes) == ("\\xc3", [0xC3])
    whole = json.loads(chat(api, **biased).model_dump_json())
    assert whole["choices"][0]["logprobs"]["content"][0]["logprob"] < 0


def test_wrong_numbers_are_refused_by_name(api):
    for call, fields, param in (
        (chat, {"top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (complete, {"logprobs": 21}, "logprobs"),
        (complete, {"logprobs": -1}, "logprobs"),
        (complete, {"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        (complete, {"max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            call(api, **fields)
        assert caught.value.body["param"] == param
