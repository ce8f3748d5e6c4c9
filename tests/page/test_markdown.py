"""Answers as Markdown in a browser: what is shown of it, what hostile text may not do, and that no
text holds up the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_feed import MODELS, ScriptedFeed

# Milliseconds that a frame may take at most, where SORT takes no longer than SORTED. Alone, none of
# NESTED takes more than 35, beside other tests 140; parsed as a whole, some take 900 to 2,000.
FRAME = 250
SORTED = 50  # milliseconds; where it takes longer, frames may
TRIES = 4
PART, LINES = 4000, 60  # letters and lines that the parser gets at once, as prose.js has them
SIZE = 200_000  # letters of a hostile text

MADE = """async (texts) => {
  const { Prose } = await import("/page/prose.js");
  const place = document.getElementById("thread"), made = [];
  for (const text of texts) {
    const prose = new Prose();
    place.replaceChildren(prose.element);
    prose.set(text, false);
    while (prose.element.hasAttribute("aria-busy")) await new Promise(requestAnimationFrame);
    for (const head of prose.element.querySelectorAll(".head")) head.remove();
    made.push([...prose.element.children].map((part) => part.innerHTML).join("").trim());
  }
  return made;
}"""
CASES = {
    "a **b** *c* ~~d~~ `e`": "<p>a <strong>b</strong> <em>c</em> <s>d</s> <code>e</code></p>",
    "one\ntwo<br>three": "<p>one<br>\ntwo<br>\nthree</p>",
    "# a\n## b\n###### c": "<h4>a</h4><h5>b</h5><h6>c</h6>",
    "1. a\n   - b\n     1. c\n3. d": (
        "<ol>\n<li>a\n<ul>\n<li>b\n<ol>\n<li>c</li>\n</ol>\n</li>\n</ul>\n</li>\n<li>d</li>\n</ol>"
    ),
    "7. a": '<ol start="7">\n<li>a</li>\n</ol>',
    "- [x] a\n- [ ] **b**\n- [y] c": (
        '<ul>\n<li class="task"><input type="checkbox" disabled="" checked="" aria-label="done">a'
        '</li>\n<li class="task"><input type="checkbox" disabled="" aria-label="to do">'
        "<strong>b</strong></li>\n<li>[y] c</li>\n</ul>"
    ),
    "> a\n> > b": ("<blockquote>\n<p>a</p>\n<blockquote>\n<p>b</p>\n</blockquote>\n</blockquote>"),
    "| a | b |\n|:-:|--:|\n| c | d |": (
        '<div class="sheet" tabindex="0" role="group" aria-label="Table"><table>\n<thead>\n<tr>\n'
        '<th class="center">a</th>\n<th class="right">b</th>\n</tr>\n</thead>\n<tbody>\n<tr>\n'
        '<td class="center">c</td>\n<td class="right">d</td>\n</tr>\n</tbody>\n</table></div>'
    ),
    "```\na <b>\n```": (
        '<div class="code"><pre tabindex="0" role="group" aria-label="Code"><code>a &lt;b&gt;'
        "</code></pre></div>"
    ),
    "---": "<hr>",
    "2 * 3 * 4 and $5 or $6": "<p>2 * 3 * 4 and $5 or $6</p>",
}
LINK = '<p><a href="{}" target="_blank" rel="noopener noreferrer nofollow">{}</a></p>'
LINKS = {
    "[a](https://x.org/b)": LINK.format("https://x.org/b", "a"),
    "http://x.org/?a=1": LINK.format("http://x.org/?a=1", "http://x.org/?a=1"),
    "![a](https://x.org/b.png)": LINK.format("https://x.org/b.png", "a"),
    "[a][1]\n\n[1]: mailto:b@x.org": LINK.format("mailto:b@x.org", "a"),
}


@pytest.fixture
def page(feed, open_page):
    """The page, with nothing more to come but what a test puts there."""
    opened = open_page(feed.url)
    opened.wait_for_function("() => document.querySelectorAll('.examples button').length === 3")
    return opened


@pytest.fixture(scope="module")
def feed():
    with ScriptedFeed(MODELS) as running:
        yield running


def test_each_kind_of_markdown_becomes_its_elements(page):
    cases = CASES | LINKS
    assert dict(zip(cases, page.evaluate(MADE, list(cases)), strict=True)) == cases


FORMULAS = r"""
Inline $e^{i\pi} = -1$ and \(a_n\), shown $$x$$ and

$$
\frac{1}{2}
$$

\[ \sum_k k \]

| $a$ |
|---|
| $b$ |

Not whole: $\frac{1$, and \href{javascript:alert(1)}{x} $\href{javascript:alert(1)}{x}$.
$\pmb{x} \fcolorbox{red}{blue}{y} \htmlStyle{color:red}{z} \includegraphics{http://x.org/a.png}$
"""
CODE = '```python\ndef f(x: int):  # why\n    return "a"\n```\n\n```nonsense\na\n```\n'


def test_formulas_are_typeset_and_code_is_coloured_without_styles_in_markup(page):
    page.evaluate(MADE, [FORMULAS + CODE])
    page.wait_for_function(
        """() => document.querySelectorAll(".typeset").length === 9
          && document.querySelectorAll("[class^=hljs]").length > 3"""
    )
    assert page.locator(".math.display .katex-display").count() == 3
    assert page.locator(".math:not(.typeset)").text_content() == r"\frac{1"
    assert page.locator(".part a").count() == 0
    assert page.locator("code[data-language=nonsense]").inner_html() == "a"
    # The fonts of formulas come from this server. document.fonts.ready may never be fulfilled.
    page.wait_for_function(
        """() => [...document.fonts].some(
          (one) => one.family === "KaTeX_Main" && one.status === "loaded")"""
    )


HOSTILE = [
    "<script>window.hurt = 1</script>", "<img src=x onerror='window.hurt = 1'>",
    "<svg onload='window.hurt = 1'><style><!--</style><img src=x onerror='window.hurt=1'>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 "
    "onerror=window.hurt=1&gt;'>",
    "<form><math><mtext></form><form><mglyph><svg><mtext><textarea><path id='</textarea>"
    "<img onerror=window.hurt=1 src=1>'></form>",
    "<iframe srcdoc='<script>parent.hurt = 1</script>'></iframe>", "<base href='//evil.org/'>",
    "<a href='javascript:window.hurt = 1'>a</a>", "[a](javascript:window.hurt=1)",
    "[a](JaVaScRiPt&colon;window.hurt=1)", "[a](&#106;avascript:window.hurt=1)",
    "[a](java\tscript:window.hurt=1)", "[a](data:text/html,<script>parent.hurt=1</script>)",
    "[a](vbscript:x)", "<javascript:window.hurt=1>", "[a](/page/main.js)", "[a](//evil.org)",
    "![a](data:image/svg+xml,<svg/onload=window.hurt=1>)", "![a](javascript:window.hurt=1)",
    "![a\" onerror=window.hurt=1](http://x.org/\"onerror=window.hurt=1)",
    "[a](http://x.org 'b\" onclick=\"window.hurt=1')", "[x]: javascript:window.hurt=1\n\n[x]",
    "```\"><img src=x onerror=window.hurt=1>\na\n```", "```x\" onclick=\"window.hurt=1\na\n```",
    "```html\n</code></pre><img src=x onerror=window.hurt=1>\n```",
    "$</code><img src=x onerror=window.hurt=1>$", "$\\text{<img src=x onerror=window.hurt=1>}$",
    "$\\href{javascript:window.hurt=1}{a}$ $\\htmlData{a=b}{c}$ $\\url{javascript:window.hurt=1}$",
    "| <img src=x onerror=window.hurt=1> |\n|-|\n| a |", "<a id=prompt name=send>a</a>",
]  # fmt: skip
LIVE = """() => [...document.querySelectorAll("#thread .prose *")].flatMap((one) => {
  const bad = one.getAttributeNames().filter((name) => /^on|^src|^id$|^name$/.test(name));
  const tags = "script img svg iframe base form style object embed link".split(" ");
  if (tags.includes(one.localName) && !one.closest("button")) bad.push(one.localName);
  const { href } = one;
  if (href && !/^(https?|mailto):/.test(href)) bad.push(href);
  if (href && new URL(href).host === location.host) bad.push(href);
  return bad.length ? [one.outerHTML] : [];
})"""


def test_hostile_markdown_is_text(page):
    asked, new = list[str](), page.url.partition("#")[0]
    page.on("request", lambda request: asked.append(request.url))
    for text in (*HOSTILE, "\n\n".join(HOSTILE), "\n".join(f"> - {one}" for one in HOSTILE)):
        page.evaluate(MADE, [text])
        page.evaluate("""async () => {
          for (const one of document.querySelectorAll("#thread *")) {
            if (one instanceof HTMLElement && one.tagName !== "A") one.click();
          }
          await new Promise(requestAnimationFrame);
        }""")
        assert page.evaluate(LIVE) == [], text
    assert page.evaluate("() => window.hurt") is None
    assert all(url.startswith(new + "page/") for url in asked), asked


GROWN = """async ([text, step, most]) => {
  const { Prose } = await import("/page/prose.js");
  const { MarkdownIt } = await import("/page/libraries.js");
  const parse = MarkdownIt.prototype.parse, read = [];
  MarkdownIt.prototype.parse = function (part, env) {
    read.push(part.length);
    return parse.call(this, part, env);
  };
  const whole = new Prose(), grown = new Prose();
  const shown = async (prose) => {
    while (prose.element.hasAttribute("aria-busy")) await new Promise(requestAnimationFrame);
  };
  const markup = (prose) => {
    for (const formula of prose.element.querySelectorAll(".math")) {
      formula.className = formula.source; // whether it is typeset yet does not matter
      formula.replaceChildren();
    }
    return [...prose.element.children].map((part) => part.innerHTML).join("");
  };
  document.getElementById("thread").replaceChildren(whole.element, grown.element);
  whole.set(text, false);
  await shown(whole);
  read.length = 0;
  for (let at = step; at < text.length; at += step) {
    grown.set(text.slice(0, at), true);
    await shown(grown);
  }
  const growing = read.reduce((sum, letters) => sum + letters, 0);
  grown.set(text, false);
  await shown(grown);
  const right = markup(whole), made = markup(grown);
  MarkdownIt.prototype.parse = parse;
  return [made === right || [made, right], growing, Math.max(...read), made.length];
}"""
BLOCKS = """# Head
A **bold
1. word**

  1. one
two

    - three
 going on

| a | b |
|---|---|
| 1 | [later] |

~~~
a

b
~~~ no end
~~~
- [ ] x

Set
===
$$
x
$$

"""


def test_an_answer_that_grows_is_read_again_only_from_its_last_block_on(page):
    same, _, most, _ = page.evaluate(GROWN, [BLOCKS + "~~~~\nopen\n", 1])
    assert same is True
    read = {}
    for many in (20, 40):
        same, read[many], most, _ = page.evaluate(GROWN, [BLOCKS * many, 131])
        assert same is True and most <= PART
    assert read[40] < 2.5 * read[20]
    same, *_ = page.evaluate(GROWN, [BLOCKS + "[later]: http://x.org/\n", 7])
    assert same is True, "what a link leads to may be said behind it"


def test_the_parser_never_has_more_than_a_part_of_a_text(page):
    for unit in ("- a\n  - b\n", "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 3000, "word ",
                 "```\ncode\n", "a\n\n", "> " * 50):  # fmt: skip
        text = (unit * (3 * PART // len(unit) + 1))[: 3 * PART]
        same, _, most, made = page.evaluate(GROWN, [text, 3 * PART // 2 + 1])
        assert same is True and most <= PART + 600 and made > PART, unit[:20]


def test_a_part_of_short_lines_has_few_of_them(page):
    """Each is laid out, however short it is."""
    same, _, most, made = page.evaluate(GROWN, ["a\n" * 10_000, 7_001])
    assert same is True and most <= 2 * LINES and made > 20_000


NESTED = {
    "quotes": "> " * (SIZE // 2),
    "lists": "".join("  " * deep + "- x\n" for deep in range(440)),
    "marks": "*a **b _c " * (SIZE // 10),
    "brackets": "[![" * (SIZE // 3),
    "rows": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * (SIZE // 10),
    "formulas": "$\\frac{x^2}{y}$ " * (SIZE // 16),
    "code": "```js\n" + "let a = [1, 'b', /c/];\n" * (SIZE // 23),
    "lines": "a\n" * (SIZE // 2),
}
BEGIN = """async (text) => {
  const { Prose } = await import("/page/prose.js");
  Object.assign(window, { prose: new Prose(), text, at: 0 });
  document.getElementById("thread").replaceChildren(window.prose.element);
}"""
# Fixed work, which says how fast the machine is.
SORT = """() => {
  const numbers = [];
  for (let n = 0, x = 1; n < 150000; n++) numbers.push(x = (x * 48271) % 2147483647);
  return numbers.sort((a, b) => a - b)[0];
}"""
# One frame, until it is painted; whether there are more.
NEXT = """(step) => new Promise((done) => {
  const { prose, text } = window, box = document.getElementById("scroll");
  if (window.at < text.length) {
    window.at += step;
    prose.set(text.slice(0, window.at), window.at < text.length);
  }
  box.scrollTop = box.scrollHeight;
  requestAnimationFrame(() => {
    const painted = new MessageChannel();
    painted.port1.onmessage = () =>
      done(window.at < text.length || prose.element.hasAttribute("aria-busy"));
    painted.port2.postMessage(0);
  });
})"""


def longest_frame(page, cpu, text: str, step: int) -> float:
    """Milliseconds of the processor that the page's thread needed at most for a frame, while so
    many letters come with each."""
    page.evaluate(BEGIN, text)
    worst, more = 0.0, True
    while more:
        before = cpu()
        more = page.evaluate(NEXT, step)
        worst = max(worst, cpu() - before)
    return worst


def test_no_frame_takes_long_while_much_nested_text_comes_at_once_and_grows(page, browser):
    """Time of the processor, and the calmest of some tries: others use the machine, too."""
    page.evaluate(MADE, ["$x$\n\n```js\n1\n```"])  # the libraries are there
    told = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    threads = [Path(f"/proc/{one['id']}/task/{one['id']}/schedstat") for one in told
               if one["type"] == "renderer"]  # fmt: skip

    def cpu() -> float:
        return sum(int(one.read_text().split()[0]) for one in threads if one.exists()) / 1e6

    def sorting() -> float:
        before = cpu()
        page.evaluate(SORT)
        return cpu() - before

    most = FRAME * max(1.0, min(sorting() for _ in range(3)) / SORTED)
    slow = {}
    for name, text in NESTED.items():
        taken = [longest_frame(page, cpu, text, SIZE // 2)]
        while min(taken) >= most and len(taken) < TRIES:
            taken.append(longest_frame(page, cpu, text, SIZE // 2))
        if min(taken) >= most:
            slow[name] = taken
    assert not slow, most
