"""What a tokenizer has accepted and not encoded yet: long prompts, and those with a grammar that
is tried first, which are under way elsewhere.

Knows no driver. Bounded by the gateways' limit on waiting requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from pipeinfer.choices import choice_id, choice_ids
from pipeinfer.messages import Submit
from pipeinfer.tokenizer.verdicts import VerdictCache


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """What one Submit asks for. `alone`: as for ledger.Entry; said when it came, since it may be an
    older one that the gateways told of. `untried`: the digest of its grammar, while that is tried.
    `refusal`: why its first grammar is not served, where it has the other one.
    """

    submit: Submit
    in_one_group: bool
    grammar_to_validate: bytes = b""
    refusal: str = ""

    def with_other_grammar(self, refusal: str) -> PendingPrompt:
        """The same where the first grammar is refused."""
        other = self.submit.otherwise
        params = structs.replace(self.submit.params, structured_outputs=other)
        submit = structs.replace(self.submit, params=params, otherwise=None)
        return replace(self, submit=submit, refusal=refusal)


def first_choice(submit: Submit) -> str:
    """The request id of its first choice, by which a prompt is known while it is encoded. There may
    be another Submit of the same request, with other choices."""
    return choice_id(submit.request_id, submit.choices[0])


def without_choice(submit: Submit, request_id: str) -> Submit | None:
    """`submit` without the choice of that request id; None if there was no other."""
    name = submit.request_id
    left = tuple(number for number in submit.choices if choice_id(name, number) != request_id)
    return structs.replace(submit, choices=left) if left else None


class PendingPrompts:
    """By first choice, in the order in which they came. `abandoned`: how many requests ended before
    they were encoded, since nobody wanted them any more."""

    def __init__(self) -> None:
        self._prompts: dict[str, PendingPrompt] = {}
        self._first_choices: dict[str, str] = {}  # of each choice that is wanted, the first
        self.abandoned = 0
        self.verdicts = VerdictCache()

    def __len__(self) -> int:
        return len(self._prompts)

    def put(self, prompt: PendingPrompt) -> None:
        """A new attempt takes the place of an older one."""
        submit, name = prompt.submit, first_choice(prompt.submit)
        for choice in choice_ids(submit.request_id, submit.choices):
            self.discard(choice)
            self._first_choices[choice] = name
        self._prompts[name] = prompt

    def get(self, name: str, attempt: int) -> PendingPrompt | None:
        """What has that first choice, if this attempt is under way, with the choices that somebody
        wants."""
        prompt = self._prompts.get(name)
        return prompt if prompt is not None and prompt.submit.attempt == attempt else None

    def waiting_for_verdict(self, grammar: bytes) -> list[str]:
        """Those that wait for a trial of that grammar."""
        return [
            name for name, prompt in self._prompts.items() if prompt.grammar_to_validate == grammar
        ]

    def end_validation(self, name: str) -> PendingPrompt:
        """It waits for no trial any more."""
        return self.replace(name, replace(self._prompts[name], grammar_to_validate=b""))

    def replace(self, name: str, prompt: PendingPrompt) -> PendingPrompt:
        """What is known by that name is `prompt` now."""
        self._prompts[name] = prompt
        return prompt

    def has(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt of the request, or a later one, is under way."""
        prompt = self._prompts.get(self._first_choices.get(request_id, ""))
        return prompt is not None and prompt.submit.attempt >= attempt

    def may_be_elsewhere(self, request_id: str) -> bool:
        """Whether it is under way, and may be one that the process before this one passed on."""
        prompt = self._prompts.get(self._first_choices.get(request_id, ""))
        return prompt is not None and not prompt.in_one_group

    def pop(self, name: str) -> None:
        """It is not under way any more."""
        submit = self._prompts.pop(name).submit
        for choice in choice_ids(submit.request_id, submit.choices):
            del self._first_choices[choice]

    def discard(self, request_id: str) -> None:
        """Nobody wants it; unknown ones are fine."""
        name = self._first_choices.pop(request_id, None)
        if name is None:
            return
        self.abandoned += 1
        prompt = self._prompts[name]
        left = without_choice(prompt.submit, request_id)
        if left is None:
            del self._prompts[name]
        else:
            self._prompts[name] = replace(prompt, submit=left)

    def discard_gateway(self, gateway: int) -> None:
        """What that gateway sent."""
        gone = {n for n, prompt in self._prompts.items() if prompt.submit.gateway == gateway}
        for choice in [choice for choice, name in self._first_choices.items() if name in gone]:
            self.discard(choice)

    def clear(self) -> None:
        """Another process goes on."""
        self._prompts.clear()
        self._first_choices.clear()
