"""How each form of calls is written: as chat templates of its models write calls of the past."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = dict[str, Any]


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: object) -> str:
    """A text as it is, all else as JSON."""
    return value if isinstance(value, str) else as_json(value)


@dataclass(frozen=True)
class Form:
    """`one`: writes a call. `around`: what stands before and behind all of them."""

    one: Callable[[str, Arguments], str]
    between: str = ""
    around: tuple[str, str] = ("", "")

    def all(self, *calls: str) -> str:
        return self.around[0] + self.between.join(calls) + self.around[1]

    def write(self, *calls: Sequence[Any]) -> str:
        return self.all(*(self.one(name, arguments) for name, arguments in calls))


def _object(key: str, before: str = "", behind: str = "") -> Callable[[str, Arguments], str]:
    return lambda name, a: before + as_json({"name": name, key: a}) + behind


def _behind(head: str, foot: str) -> Callable[[str, Arguments], str]:
    return lambda name, a: head.replace("NAME", name) + as_json(a) + foot


def in_python(value: object) -> str:
    """As models write values that saw JSON and Python."""
    return str(value) if value is None or isinstance(value, bool) else as_json(value)


def _called(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={in_python(v)}' for key, v in arguments.items())})"


def _elements(head: str, one: str, foot: str) -> Callable[[str, Arguments], str]:
    def write(name: str, arguments: Arguments) -> str:
        said = (
            one.replace("TEXT", as_json(isinstance(v, str)))
            .replace("KEY", k)
            .replace("VALUE", plain(v))
            for k, v in arguments.items()
        )
        return head.replace("NAME", name) + "".join(said) + foot

    return write


FORMS = {
    "hermes": Form(_object("arguments", "<tool_call>\n", "\n</tool_call>"), "\n"),
    "llama3_json": Form(_object("parameters"), "; "),
    "mistral": Form(_object("arguments"), ", ", ("[TOOL_CALLS][", "]")),
    "granite": Form(_object("arguments"), ", ", ("<|tool_call|>[", "]")),
    "hunyuan_a13b": Form(_object("arguments"), ", ", ("<tool_calls>[", "]</tool_calls>")),
    "phi4_mini_json": Form(_object("arguments"), ", ", ("functools[", "]")),
    "qwen3_coder": Form(
        _elements(
            "<tool_call>\n<function=NAME>\n",
            "<parameter=KEY>\nVALUE\n</parameter>\n",
            "</function>\n</tool_call>",
        ),
        "\n",
    ),
    "seed_oss": Form(
        _elements(
            "<seed:tool_call>\n<function=NAME>\n",
            "<parameter=KEY>VALUE</parameter>\n",
            "</function>\n</seed:tool_call>",
        ),
        "\n",
    ),
    "minimax_m2": Form(
        _elements(
            '<invoke name="NAME">\n', '<parameter name="KEY">VALUE</parameter>\n', "</invoke>\n"
        ),
        around=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    ),
    "glm45": Form(
        _elements(
            "<tool_call>NAME\n",
            "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
            "</tool_call>",
        ),
        "\n",
    ),
    "glm47": Form(
        _elements(
            "<tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", "</tool_call>"
        )
    ),
    "deepseek_v3": Form(
        _behind(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜>",
        ),
        "\n",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31": Form(
        _behind("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v32": Form(
        _elements(
            '<｜DSML｜invoke name="NAME">\n',
            '<｜DSML｜parameter name="KEY" string="TEXT">VALUE</｜DSML｜parameter>\n',
            "</｜DSML｜invoke>\n",
        ),
        around=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    ),
    "deepseek_v4": Form(
        _elements(
            '<｜DSML｜invoke name="NAME">\n',
            '<｜DSML｜parameter name="KEY" string="TEXT">VALUE</｜DSML｜parameter>\n',
            "</｜DSML｜invoke>\n",
        ),
        around=("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
    ),
    "kimi_k2": Form(
        _behind(
            "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|>"
        ),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "xlam": Form(_object("arguments"), ", ", ("[", "]")),
    "gigachat3": Form(_object("arguments", "<|function_call|>")),
    "pythonic": Form(_called, ", ", ("[", "]")),
    "lfm2": Form(_called, ", ", ("<|tool_call_start|>[", "]<|tool_call_end|>")),
    "olmo3": Form(_called, "\n", ("<function_calls>", "</function_calls>")),
}
ANY = Form(_object("parameters"), ", ", ("[", "]"))


# Of every form, how an answer begins a call: as far as its name is not certain yet.
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "granite": ("<|tool_call|>",),
    "hunyuan_a13b": ("<tool_calls>", "</tool_calls>"),
    "phi4_mini_json": ("functools",),
    "qwen3_coder": ("<tool_call>", "<function=", "</tool_call>"),
    "seed_oss": ("<seed:tool_call>", "<function=", "</seed:tool_call>"),
    "minimax_m2": ("<minimax:tool_call>", '<invoke name="', "</minimax:tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>"),
    "glm47": ("<tool_call>", "</tool_call>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v32": (
        "<｜DSML｜function_calls>",
        '<｜DSML｜invoke name="',
        "</｜DSML｜function_calls>",
    ),
    "deepseek_v4": ("<｜DSML｜tool_calls>", '<｜DSML｜invoke name="', "</｜DSML｜tool_calls>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "xlam": ('[{"name": ',),
    "gigachat3": ("<|function_call|>",),
    "pythonic": ("[get_weather(",),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
}
ALONE = ("llama3_json", "xlam")  # calls are all of an answer
WIEN = {"city": "Wien", "days": 3}
NESTED = {
    "units": {"x": [1, {"y": None, "z": [[], {}]}], "wind": {"unit": "km/h"}},
    "places": [["a", 1], {"b": True}, "c", -0.5],
}
WORDS = {"city": "Zürich 北京 🌧️ e\u0301 \u2028", "note": "日本語"}
QUOTED = {"text": 'say "hi"\n\tand \\ or \'so\'\r\n{"a": [1, "}"]}\n', "path": "C:\\temp\\new"}
TYPED = {"query": "3", "exact": True, "sorted": False, "limit": None}
NUMBERS = {"days": 12345678901234567890, "wind": -1.5e-3, "kind": "3", "note": "null and void"}
SPACED = {"text": "  two\n\nlines \n ", "path": ""}


def texts(name: str) -> list[dict[str, Any]]:
    """Answers in one form, with what they say: `of`, `text`, `content`, `calls`, of which one that
    is cut off has the text of its arguments as a third part."""
    form = FORMS[name]
    write, alone = form.write, name in ALONE
    cases: list[tuple[str, str, str, list[list[Any]]]] = [
        ("no call", "Vienna is a city, {and} 1 < 2 [3].", "Vienna is a city, {and} 1 < 2 [3].", []),
        ("nothing", "", "", []),
        ("white space that is kept", "\n a\n\n b \n", "\n a\n\n b \n", []),
        ("one call", write(("get_weather", WIEN)), "", [["get_weather", WIEN]]),
        ("no arguments", write(("now", {})), "", [["now", {}]]),
        (
            "two calls",
            write(("get_weather", WIEN), ("now", {})),
            "",
            [["get_weather", WIEN], ["now", {}]],
        ),
        (
            "calls of one function",
            write(*(("search", {"query": q}) for q in "abc")),
            "",
            [["search", {"query": q}] for q in "abc"],
        ),
        ("line ends around", f"\n\n{write(('now', {}))}\n\n", "", [["now", {}]]),
        ("nested values", write(("get_weather", NESTED)), "", [["get_weather", NESTED]]),
        ("letters of the world", write(("get_weather", WORDS)), "", [["get_weather", WORDS]]),
        ("quotes and escapes", write(("write_file", QUOTED)), "", [["write_file", QUOTED]]),
        ("values by their types", write(("search", TYPED)), "", [["search", TYPED]]),
        ("numbers", write(("get_weather", NUMBERS)), "", [["get_weather", NUMBERS]]),
    ]
    marked = {"text": f"say {' '.join(MARKERS[name])} and go", "path": MARKERS[name][0]}
    cases.append(("markers in a text", write(("write_file", marked)), "", [["write_file", marked]]))
    if name != "qwen3_coder":  # whose values stand on lines of their own
        cases.append(("spaces", write(("write_file", SPACED)), "", [["write_file", SPACED]]))
    for marker in MARKERS[name]:
        for many in {1, len(marker) // 2, len(marker) - 1}:
            text = f"So {marker[:many]}"
            cases.append((f"{many} letters of {marker}", text, text, []))
            cases.append((f"{many} letters of {marker} and more", f"{text} x", f"{text} x", []))
        text = f"The marker {marker} is said."
        cases.append((f"{marker} alone", text, text, []))
        cases.append((f"{marker} at the end", text[: -len(" is said.")], text[:-9], []))
    if not alone:
        calls = [["dance", {"x": 1}], ["now", {}]]
        if name == "pythonic":  # whose lists begin with a tool, or are none
            cases.append(("an unknown tool", write(*calls), write(*calls), []))
            calls.reverse()
        both = write(*calls)
        cases += [
            ("an unknown tool among others", both, "", calls),
            ("content before", f"I look.\n\n{both}", "I look.", calls),
            ("content behind", f"{both}\n\nDone.", "Done.", calls),
            ("content around", f"Well: {both} Done. \n", "Well:Done. \n", calls),
            ("answers and calls", f"A{write(('now', {}))}B{write(('now', {}))}C", "ABC",
             [["now", {}], ["now", {}]]),
            ("a marker begins behind", f"{both} a <to", "a <to", calls),
        ]  # fmt: skip
    whole = write(("get_weather", WIEN))
    named = whole.index("weather")
    cases.append(("cut off amid the name", whole[:named], whole[:named], []))
    cut = whole.index("Wien") + 3
    cases.append(
        ("cut off amid a value", whole[:cut], "", [["get_weather", WIEN, '{"city": "Wie']])
    )
    second = write(("now", {}), ("get_weather", WIEN))
    cut = second.index("Wien") + 2
    cases.append(
        (
            "cut off amid the second call",
            second[:cut],
            "",
            [["now", {}], ["get_weather", WIEN, '{"city": "Wi']],
        )
    )
    at = max(whole.rfind(ending) for ending in ("</", "<｜tool▁call▁end", "<|tool_call_end"))
    if form.around[1].startswith("<"):
        at = whole.index(form.around[1])
    if at > 0 and MARKERS[name][-1][0] == "<":
        cases.append(("without an end", whole[:at], "", [["get_weather", WIEN]]))
        cases.append(("cut off amid its end", whole[: at + 5], "", [["get_weather", WIEN]]))
    return [dict(zip(("of", "text", "content", "calls"), case, strict=True)) for case in cases]
