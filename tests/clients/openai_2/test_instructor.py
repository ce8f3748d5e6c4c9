"""instructor, in each mode that can hold a model that knows nothing to a form."""

import instructor
import openai
import pytest
from bounded import KEY, MODEL, QUESTION, Anything, Person

SCHEMAS = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]
COPIED = [{"role": "user", "content": 'Copy: {"a": 7}'}]
BLOCK = '```json\n\\{"name": "[a-z]{1,8}", "age": [0-9]{1,2}, "mood": "glad"\\}\n```'


def client(url, mode):
    api = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
    return instructor.from_openai(api, mode=mode)


@pytest.mark.parametrize("mode", SCHEMAS, ids=lambda mode: mode.name)
def test_a_form_is_kept(url, mode):
    asked = {"model": MODEL, "messages": QUESTION, "response_model": Person, "max_retries": 0}
    api = client(url, mode)
    assert isinstance(api.chat.completions.create(**asked), Person)
    *_, last = api.chat.completions.create_partial(**asked)
    assert Person.model_validate(last.model_dump())


def test_any_json_object_is_taken(url):
    found = client(url, instructor.Mode.JSON).chat.completions.create(
        model=MODEL, messages=COPIED, response_model=Anything, max_retries=0, max_tokens=400
    )
    assert isinstance(found, Anything)


def test_json_in_a_block(url):
    """The block is asked for in words, which the demo model does not understand: so by form."""
    found = client(url, instructor.Mode.MD_JSON).chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        response_model=Person,
        max_retries=0,
        extra_body={"structured_outputs": {"regex": BLOCK}},
    )
    assert isinstance(found, Person)
