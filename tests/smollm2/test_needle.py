"""A number is found in 580 tokens, and again where these tokens come from the cache."""

from __future__ import annotations

from smollm2_prompts import NAME, needle

KEY = 48271


def test_needle_is_found_and_a_cached_prompt_changes_nothing(api):
    first, again = (
        api.completions.create(model=NAME, prompt=needle(KEY), temperature=0, max_tokens=12)
        for _ in range(2)
    )
    assert first.usage.prompt_tokens > 550
    assert str(KEY) in first.choices[0].text
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, again)]
    assert again.choices[0].text == first.choices[0].text
    assert cached[0] < 100 and cached[1] > 500, cached
