"""A hostile grammar costs the process that tries it, or some seconds, and nobody else anything."""

import asyncio
import json
import os
import signal
from pathlib import Path

import msgspec
import pytest
from costly_grammars import AMBIGUOUS, HONEST, growing
from vocabulary import SETUP

from pipeinfer.grammars import bounds, compiling, validation
from pipeinfer.grammars.validation import TooSlow, ValidationProcess, ValidationTask
from pipeinfer.params import StructuredOutputs
from pipeinfer.processes import write_frame
from waiting import until

SMALL = {"json": '{"type": "integer"}'}
SLOW = {"json": '{"type": "integer", "multipleOf": 999983}'}  # 9 s, which nothing can cancel


def verdict(tried, **spec):
    try:
        return tried.verdict(StructuredOutputs(**spec))
    except TooSlow as error:
        return str(error)


def references(length):
    names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**names, f"d{length}": {"type": "integer"}}}
    return json.dumps(schema, separators=(",", ":"))


def rules(length):
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(length))
    return f'start: r0\n{chain}r{length}: "b"\n'


@pytest.fixture(scope="module")
def usual():
    tried = ValidationProcess(SETUP, seconds=1.0)
    yield tried
    tried.kill()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"json": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
        ({"json": '{"not": {"const": 1}}'}, "not"),
        ({"json": '{"if": {"const": 1}, "then": {"const": 2}}'}, "if"),
        ({"json": '{"type": "nope"}'}, "type: this is no JSON Schema"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": '{"type": '}, "not valid JSON"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nobody"}, "unknown name"),
        ({"grammar": "!!!"}, "lexer error"),
    ],
)
def test_what_does_not_compile_is_refused_by_name(usual, spec, says):
    before = usual.ended_runs
    assert says in verdict(usual, **spec)
    assert usual.ended_runs == before


@pytest.mark.parametrize(
    "spec",
    [
        SMALL,
        {"json": references(1700)},
        {"grammar": rules(3000)},
        {"grammar": 'start: /[a-z ]*/ <|reserved_0|> %json {"type": "integer"} <|reserved_1|>'},
        {"choice": ("a", 'b"c', "é\n/")},
    ],
)
def test_what_compiles(usual, spec):
    before = usual.ended_runs
    assert (verdict(usual, **spec), usual.ended_runs) == ("", before)


def test_what_trips_a_limit_at_its_first_choice_is_refused_by_name():
    """That takes half a second, which the others' limit is too near to."""
    tried = ValidationProcess(SETUP, seconds=60.0)
    try:
        assert "too many expressions" in verdict(tried, regex="(((a{100}){100}){100}){100}")
        assert tried.ended_runs == 0
    finally:
        tried.kill()


COSTLY = {
    "of the parser": (AMBIGUOUS, "too much work"),
    "of the lexer": (growing("a"), "too much work"),
    "of more than a row may have": (
        json.dumps(
            {
                "type": "object",
                "properties": {f"k{n}": {"type": "integer"} for n in range(1500)},
                "additionalProperties": False,
            }
        ),
        "items",
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_grammar_whose_masks_cost_too_much_is_refused_by_name(usual, name):
    text, says = COSTLY[name]
    spec = {"json" if text.startswith("{") else "grammar": text}
    before = usual.ended_runs
    assert says in verdict(usual, **spec) and usual.ended_runs == before


@pytest.mark.parametrize("name", HONEST)
def test_a_large_grammar_that_costs_little_is_served(usual, name):
    assert verdict(usual, **HONEST[name]) == ""


def test_one_that_takes_long_is_ended_and_the_next_needs_no_other_process(usual):
    assert verdict(usual, **SMALL) == ""
    before, process = usual.ended_runs, usual._process.pid
    assert "longer than 1 s" in verdict(usual, **SLOW) and usual.ended_runs == before + 1
    assert verdict(usual, **SMALL) == "" and usual._process.pid == process


def test_one_that_overflows_the_stack_is_refused_and_the_next_is_tried():
    tried = ValidationProcess(msgspec.structs.replace(SETUP, stack=512 * 1024))
    try:
        assert "too complex" in verdict(tried, json=references(1700))
        assert tried.ended_runs == validation.MAX_RUNS
        assert verdict(tried, **SMALL) == ""
    finally:
        tried.kill()


def test_a_process_that_somebody_killed_is_started_again(usual):
    assert verdict(usual, regex="a") == ""
    process = usual._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert verdict(usual, regex="b") == ""


async def test_a_process_that_somebody_kills_in_the_middle_says_nothing_of_the_grammar():
    """It is started again, once: then there is no verdict, rather than a wrong one."""
    tried = ValidationProcess(SETUP, seconds=60.0)
    try:
        assert verdict(tried, **SMALL) == ""
        asked = asyncio.get_running_loop().run_in_executor(None, lambda: verdict(tried, **SLOW))
        for _ in range(validation.MAX_RUNS):
            await until(lambda: tried._process is not None)
            pid = tried._process.pid
            await until(lambda pid=pid: living_children(pid))
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: tried._process is None or tried._process.pid != pid)
        with pytest.raises(RuntimeError, match="ended"):
            await asked
        assert tried.ended_runs == 0
        assert verdict(tried, **SMALL) == ""
    finally:
        tried.kill()


def test_a_trial_has_less_stack_than_an_engine():
    assert bounds.VALIDATION_STACK_BYTES < compiling.COMPILE_STACK_BYTES


def test_too_large_a_grammar_starts_no_process():
    tried = ValidationProcess(SETUP)
    assert "at most 65536" in verdict(tried, regex="a" * 70_000)
    assert tried._process is None


async def test_a_process_ends_with_who_asked_it_also_while_it_compiles():
    tried = ValidationProcess(SETUP)
    try:
        assert verdict(tried, **SMALL) == ""
        process = tried._process
        task = ValidationTask(StructuredOutputs(**SLOW), 60.0, 0)
        write_frame(process.stdin, msgspec.msgpack.encode(task))
        await until(lambda: living_children(process.pid))
        [copy] = living_children(process.pid)
        process.stdin.close()
        assert process.wait(5) == 0
        await until(lambda: not living(copy))
    finally:
        tried._process.stdout.close()
        tried._process = None


def living(pid):
    """The process that started it; 0 where it has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(parent)


def living_children(pid):
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [number for number in numbers if living(number) == pid]


def test_whatever_a_translation_raises_is_an_answer(usual):
    before = usual.ended_runs
    assert "nobody" in verdict(usual, grammar="root ::= nobody") and usual.ended_runs == before


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE = {
    "a chain that is too long": {"json": references(6000)},
    "objects": {"json": json.dumps(nested(63))},
    "brackets": {"json": '{"a":' * 400 + "1" + "}" * 400},
    "counts": {"regex": "((((a{1000}){1000}){1000}){1000}){1000}"},
    "alternatives": {"regex": "|".join(f"a{{0,{i}}}b" for i in range(3000))},
    "groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "a reference to elsewhere": {"json": '{"$ref": "http://example.com/schema.json"}'},
    "a reference to nothing": {"json": '{"$ref": "#/$defs/a"}'},
    "rules that need themselves": {"grammar": "start: start start nobody"},
    "a text in a schema's place": {"json": '"object"'},
    "GBNF of letters": {"grammar": "root ::= " + '"a" | ' * 8000 + '"b"'},
}


LAZY = ("alternatives",)  # compile in no time; what they cost comes with each token


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_answered_in_time_and_the_next_is_served(usual, name):
    assert bool(verdict(usual, **HOSTILE[name])) == (name not in LAZY)
    assert verdict(usual, **SMALL) == ""
