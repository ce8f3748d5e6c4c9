"""The page in a browser, against one real server with the demo model, a key, and tools."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from servers import Server

KEY = "pik-of-a-test"
SILENCE = 5.0  # seconds after which a stage that says nothing counts as lost
TEMPLATE = Path(__file__).parents[1] / "clients" / "hermes.jinja"
STAGES = "gateway, tokenizer, scheduler, engine and detokenizer. Each one is a process."
LONG = json.dumps({"ignore_eos": True, "max_tokens": 1800})
TRIES = 8  # of what an answer must not end before: some seconds, in which a machine may stall
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"enum": [1, 2]}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
STORED = """async () => {
  const all = [JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie];
  for (const { name } of await indexedDB.databases()) {
    const database = await new Promise((done) => {
      const request = indexedDB.open(name);
      request.onsuccess = () => done(request.result);
    });
    for (const store of database.objectStoreNames) {
      all.push(JSON.stringify(await new Promise((done) => {
        const request = database.transaction(store).objectStore(store).getAll();
        request.onsuccess = () => done(request.result);
      })));
    }
    database.close();
  }
  return all.join();
}"""


SHARED = "The context, of prompt and answer, has 2,048."
WRONG = [
    ("Temperature", "-1", "Temperature is between 0 and 100."),
    ("Top p", "1.5", "Top p is between 0 and 1."),
    ("Top k", "2.5", "Top k is a whole number."),
    ("Most tokens", "0", f"Most tokens is between 1 and 2047. {SHARED}"),
    ("Most tokens", "2048", f"Most tokens is between 1 and 2047. {SHARED}"),
    ("Repetition penalty", "0", "Repetition penalty is between 0.01 and 100."),
    ("Seed", "99999999999999999999", "Seed has at most 15 digits."),
    ("Stop at, one a line", "a\n" * 17, "At most 16 lines."),
]


@pytest.fixture(scope="module")
def server():
    arguments = "--api-key", KEY, "--threads", "1", "--kv-pages", "2000"
    with Server(*arguments, "--chat-template", str(TEMPLATE)) as running:
        yield running


@pytest.fixture
def chat(server, open_page):
    """The page after its key was given."""
    page = open_page(server.url)
    give_key(page)
    return page


def expect(thing):
    from playwright.sync_api import expect

    return expect(thing)


def give_key(page, key: str = KEY) -> None:
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


def ask(page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page):
    """Those that have ended."""
    return page.locator(".answer:has(.foot)")


def option(page, label: str, value: str) -> None:
    panel = page.locator("#options")
    if not panel.is_visible():
        page.get_by_role("button", name="Options", exact=True).click()
    panel.get_by_label(label, exact=True).fill(value)


def ended(server) -> dict[str, float]:
    """Requests that have ended so far, by how."""
    found = re.findall(
        r'^pipeinfer_requests_total\{outcome="(\w+)"\} ([\d.]+)', server.get("/metrics")[1], re.M
    )
    return {outcome: float(count) for outcome, count in found}


def test_a_wrong_key_is_asked_for_again_and_the_right_one_is_stored_nowhere(server, open_page):
    page = open_page(server.url)
    give_key(page, "wrong")
    expect(page.locator("#key-reason")).to_contain_text("not one of this server's")
    give_key(page)
    expect(page.locator("#model")).to_contain_text("pipeinfer-demo")
    ask(page, "What are the stages?")
    expect(page.locator(".answer .said")).to_have_text(STAGES)
    expect(answers(page)).to_have_count(1)
    stored = page.evaluate(STORED)
    assert "What are the stages?" in stored
    assert KEY not in stored
    page.reload()
    expect(page.get_by_label("API key", exact=True)).to_be_visible()


def test_who_gives_no_key_is_told_and_asked_again_with_the_next_question(server, open_page):
    page = open_page(server.url)
    page.get_by_role("button", name="Not now").click()
    expect(page.locator("#model")).to_have_text("wrong or missing API key")
    ask(page, "What are the stages?")
    page.get_by_role("button", name="Not now").click()
    expect(page.locator(".error")).to_have_text("wrong or missing API key")
    page.get_by_role("tab", name="Pipeline").click()
    page.get_by_role("button", name="Not now").click()
    expect(page.locator(".feed-note")).to_contain_text("choose Pipeline again")
    page.get_by_role("tab", name="Pipeline").click()
    give_key(page)
    expect(page.locator(".stage")).to_have_count(5)
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".answer .said")).to_have_text(STAGES)


def test_an_answer_streams_and_says_how_fast_it_was(chat):
    shown = """() => new Promise((done) => {
      const seen = new Set();
      new MutationObserver(() => {
        const said = document.querySelector(".answer .said");
        if (said) seen.add(said.textContent);
        if (document.querySelector(".answer .foot")) done([...seen]);
      }).observe(document.getElementById("thread"),
        { childList: true, subtree: true, characterData: true });
      document.getElementById("prompt").value = "What are the stages?";
      document.getElementById("composer").requestSubmit();
    })"""
    seen = chat.evaluate(shown)
    for _ in range(TRIES):
        if len(seen) > 1:
            break
        chat.get_by_role("button", name="New conversation").click()
        seen = chat.evaluate(shown)
    assert len(seen) > 1 and seen[-1] == STAGES, "a browser without time shows few of the states"
    assert all(STAGES.startswith(one) for one in seen)
    for fact in (r"\d+ tokens\b", r"[\d.,]+ tokens/s", r"first after [\d.]+.m?s", r"prompt \d+"):
        expect(chat.locator(".answer .foot")).to_contain_text(re.compile(fact))
    expect(chat.locator("#announcer")).to_have_text(f"Answer: {STAGES}")
    expect(chat.locator("#title")).to_have_text("What are the stages?")


def test_stop_ends_the_answer_and_the_servers_request(server, open_page):
    """The server may cut the stream, which it is told to forget, before the browser leaves it."""
    chat = open_page(server.url, cuts=True)
    give_key(chat)
    option(chat, "Of the request's body, as JSON", LONG)
    for stop in (lambda: press_stop(chat), lambda: chat.keyboard.press("Escape")):
        for _ in range(TRIES):
            outcomes = stopped(server, chat, stop)
            if outcomes == {"abort": 1}:
                break
        assert outcomes == {"abort": 1}
        expect(chat.locator(".answer .foot")).to_contain_text("stopped")
        expect(chat.get_by_role("button", name="Send", exact=True)).to_be_visible()
        assert len(chat.locator(".answer .said").text_content()) < 1800


def press_stop(chat) -> None:
    from playwright.sync_api import TimeoutError

    with contextlib.suppress(TimeoutError):  # the answer has ended
        chat.get_by_role("button", name="Stop", exact=True).click(timeout=10_000)


def stopped(server, chat, stop) -> dict[str, float]:
    """How the request of an answer ended that was stopped as soon as there was something of it."""
    before = ended(server)
    chat.get_by_role("button", name="New conversation").click()
    ask(chat, "Count from 3 to 12.")
    expect(chat.locator(".answer .said")).to_contain_text("3 4")
    stop()
    expect(answers(chat)).to_have_count(1)

    def outcomes() -> dict[str, float]:
        return {
            outcome: count - before.get(outcome, 0.0)
            for outcome, count in ended(server).items()
            if count != before.get(outcome, 0.0)
        }

    return server.wait(outcomes, "its request ends")


def test_an_answer_goes_on_by_itself_after_the_gateways_death(server, open_page):
    fields = {"ignore_eos": True, "max_tokens": 300, "temperature": 0.8, "seed": 4}
    body = {"messages": [{"role": "user", "content": "Count from 3 to 12."}], **fields}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        whole = json.load(answer)["choices"][0]["message"]["content"]
    page = open_page(server.url, cuts=True)
    give_key(page)
    option(page, "Of the request's body, as JSON", json.dumps(fields))
    ask(page, "Count from 3 to 12.")
    expect(page.locator(".answer .said")).not_to_be_empty()
    os.kill(server.pid("gateway"), signal.SIGKILL)
    expect(page.locator(".answer .foot")).to_contain_text("300 tokens")
    expect(page.locator(".error")).to_have_count(0)
    stored = page.evaluate(STORED)
    assert json.dumps(whole, ensure_ascii=False)[1:-1] in stored, "each letter, and each once"


def test_a_question_is_edited_and_an_answer_made_again(chat):
    ask(chat, "Count from 3 to 12.")
    expect(answers(chat)).to_have_count(1)
    ask(chat, "What is 7 + 15?")
    expect(answers(chat)).to_have_count(2)
    first = chat.locator(".user").first
    first.get_by_role("button", name="Edit and ask again").click()
    chat.get_by_label("Your message, edited").fill("What are the stages?")
    chat.keyboard.press("Enter")
    expect(chat.locator(".answer .said")).to_have_text([STAGES])
    expect(chat.locator(".user .said")).to_have_text(["What are the stages?"])
    expect(answers(chat)).to_have_count(1)
    chat.get_by_role("button", name="Answer again").click()
    expect(answers(chat)).to_have_count(1)
    expect(chat.locator(".answer .said")).to_have_text([STAGES])


def test_a_reload_keeps_conversations_which_are_renamed_found_and_deleted(chat):
    option(chat, "System prompt", "Be short.")
    for text in ("Count from 3 to 12.", "What is 7 + 15?"):
        chat.get_by_role("button", name="New conversation").click()
        ask(chat, text)
        expect(answers(chat)).to_have_count(1)
    chat.reload()
    give_key(chat)
    titles = chat.locator("#conversations .open")
    expect(titles).to_have_text(["What is 7 + 15?", "Count from 3 to 12."])
    expect(chat.locator(".answer .said")).to_have_text(["7 + 15 = 22"])
    titles.last.click()
    expect(chat.locator(".answer .said")).to_have_text(["3 4 5 6 7 8 9 10 11 12"])
    chat.get_by_role("button", name="Options", exact=True).click()
    expect(chat.get_by_label("System prompt")).to_have_value("Be short.")
    rows = chat.locator("#conversations li")
    rows.last.hover()
    rows.last.get_by_role("button", name="Rename").click()
    chat.get_by_label("Title of the conversation").fill("Numbers")
    chat.keyboard.press("Enter")
    expect(titles).to_have_text(["What is 7 + 15?", "Numbers"])
    chat.get_by_label("Search conversations").fill("numb")
    expect(chat.locator("#conversations li:visible")).to_have_count(1)
    chat.get_by_label("Search conversations").fill("")
    rows.last.hover()
    rows.last.get_by_role("button", name="Delete").click()
    chat.locator("#sure-dialog").get_by_role("button", name="Delete").click()
    expect(titles).to_have_text(["What is 7 + 15?"])
    assert "3 4 5 6 7" not in chat.evaluate(STORED)


def test_options_reach_the_server_and_its_errors_are_shown_in_place(chat):
    option(chat, "Most tokens", "3")
    ask(chat, "Count from 3 to 12.")
    expect(chat.locator(".answer .said")).to_have_text("3 4")
    expect(chat.locator(".answer .foot")).to_contain_text("cut at its most tokens")
    for label, value, why in WRONG:
        option(chat, label, value)
        expect(chat.locator("#options .wrong:not(:empty)")).to_have_text(why)
        ask(chat, "Count from 3 to 12.")
        expect(chat.locator("#options").get_by_label(label, exact=True)).to_be_focused()
        option(chat, label, "")
    assert chat.locator(".user").count() == 1, "what is out of range is not sent"
    option(chat, "Of the request's body, as JSON", '{"temperature": -1}')
    ask(chat, "Count from 3 to 12.")
    expect(chat.locator(".error")).to_contain_text("temperature")
    option(chat, "Functions, as JSON", "[{")
    expect(chat.locator("#option-tools-wrong")).to_contain_text("Tools: ")
    ask(chat, "Count from 3 to 12.")
    expect(chat.get_by_label("Functions, as JSON")).to_be_focused()
    assert chat.locator(".user").count() == 2


def test_log_probs_are_shown_token_by_token_with_the_keyboard_alone(chat):
    chat.get_by_role("button", name="Options", exact=True).click()
    chat.get_by_label("Show how likely each token was").check()
    ask(chat, "What is 7 + 15?")
    expect(chat.locator(".tokens")).to_have_text("7 + 15 = 22")
    expect(answers(chat)).to_have_count(1)
    chat.locator(".tokens span").first.focus()
    expect(chat.get_by_role("tooltip")).to_contain_text("7")
    chat.keyboard.press("End")
    chat.keyboard.press("ArrowLeft")
    rows = chat.get_by_role("tooltip").locator("tr")
    expect(rows).to_have_count(5)
    expect(rows.first).to_contain_text("2")
    expect(rows.first).to_contain_text("%")


def test_a_schema_forms_the_answer(chat):
    schema = {"type": "object", "properties": {"sum": {"const": 22}}, "required": ["sum"],
              "additionalProperties": False}  # fmt: skip
    option(chat, "JSON schema", json.dumps(schema))
    ask(chat, "What is 7 + 15?")
    expect(answers(chat)).to_have_count(1)
    assert json.loads(chat.locator(".answer .said").text_content()) == {"sum": 22}


def test_a_tool_is_called_and_its_result_sent_on(chat):
    option(chat, "Functions, as JSON", json.dumps([WEATHER]))
    chat.get_by_label("May they be called?").select_option("required")
    option(chat, "Of the request's body, as JSON", '{"parallel_tool_calls": false}')
    ask(chat, "What is the weather?")
    expect(chat.get_by_label("Result of weather")).to_be_visible()
    expect(chat.locator(".call h4")).to_have_text("weather")
    assert json.loads(chat.locator(".call pre").text_content())["days"] in (1, 2)
    chat.get_by_label("May they be called?").select_option("none")
    with chat.expect_request("**/v1/chat/completions") as sent:
        chat.get_by_label("Result of weather").fill("sunny")
        chat.get_by_role("button", name="Send result").click()
    call, result = sent.value.post_data_json["messages"][-2:]
    assert call["tool_calls"][0]["function"]["name"] == "weather"
    assert result == {
        "role": "tool", "content": "sunny", "tool_call_id": call["tool_calls"][0]["id"],
    }  # fmt: skip
    expect(answers(chat)).to_have_count(2)


def test_everything_is_reached_by_keys(chat):
    chat.keyboard.press("Alt+KeyO")
    expect(chat.locator("#options")).to_be_visible()
    chat.keyboard.press("Escape")
    expect(chat.locator("#options")).to_be_hidden()
    chat.keyboard.press("Alt+KeyK")
    expect(chat.get_by_role("heading", name="Keyboard shortcuts")).to_be_visible()
    chat.keyboard.press("Escape")
    chat.keyboard.press("Alt+KeyI")
    expect(chat.get_by_label("Message", exact=True)).to_be_focused()
    chat.keyboard.press("Alt+KeyP")
    expect(chat.locator("#pipeline")).to_be_visible()
    chat.locator("#tab-pipeline").focus()
    chat.keyboard.press("ArrowLeft")
    expect(chat.locator("#chat")).to_be_visible()
    expect(chat.locator("#tab-chat")).to_be_focused()


def test_axe_finds_nothing_in_a_chat(server, open_page, no_violations):
    page = open_page(server.url, reduced_motion="reduce")  # colours change at once
    give_key(page)
    no_violations(page)
    page.get_by_role("button", name="Options", exact=True).click()
    page.get_by_label("Show how likely each token was").check()
    ask(page, "What is 7 + 15?")
    expect(answers(page)).to_have_count(1)
    option(page, "Of the request's body, as JSON", '{"temperature": -1}')
    ask(page, "What is 7 + 15?")
    expect(page.locator(".error")).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        no_violations(page)


def fetched(server, path: str, body: dict | None = None) -> dict:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(server.url + path, data, headers), timeout=60
    ) as answer:
        return json.load(answer)


def counted(server) -> str:
    """The id of a request that every stage has seen pass: those asked to look only a moment ago may
    have missed it, then it is another one's turn."""
    body = {"messages": [{"role": "user", "content": "Count from 3 to 12."}]}
    for seconds in (3, 3, 3, 6, 12, 24, 48):
        name = fetched(server, "/v1/chat/completions", body)["id"]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(urllib.error.HTTPError):  # 404: no stage has told of it yet
                if len(fetched(server, f"/monitor/requests/{name}")["spans"]) == 5:
                    return name
            time.sleep(0.05)
    raise AssertionError("stages are not looked at")


def test_a_requests_way_through_the_stages_is_shown(server, chat):
    chat.get_by_role("tab", name="Pipeline").click()
    expect(chat.locator(".stage .state")).to_have_text(["● ready"] * 5)
    name = counted(server)
    row = chat.locator(f".requests tr:has(button[title={name}])")
    expect(row).to_contain_text("stop")
    row.get_by_role("button").focus()
    chat.keyboard.press("Enter")
    dialog = chat.locator("dialog.timeline")
    expect(dialog.get_by_role("heading")).to_have_text(name)
    expect(dialog.locator("tbody th")).to_have_count(5)
    seen = set(dialog.locator("tbody th").all_text_contents())
    assert seen == {"gateway-0", "tokenizer-0", "scheduler-0", "engine-0-0", "detokenizer-0"}
    expect(dialog.locator("rect.passage")).to_have_count(5)
    took = re.compile(r"^[\d.,]+\s(ms|s)$")  # "s" where the machine is busy
    expect(dialog.locator("tbody td:nth-child(3)").filter(has_text=took)).to_have_count(5)
    first_text = re.compile(r"first text \(tokens \d+, [\d.]+\s(ms|s)\)")
    expect(dialog.locator("tr", has_text="detokenizer-0")).to_contain_text(first_text)
    chat.keyboard.press("Escape")
    latency = chat.locator(".stage dl > div:nth-child(2) dd")
    expect(latency.filter(has_text=took)).to_have_count(5)
    expect(chat.locator(".steps .quiet")).to_contain_text("steps; decodes of each on average")
    chat.get_by_role("heading", name="Largest cached prefixes").click()
    expect(chat.locator(".prefixes li").first).to_contain_text("tokens")


def test_steps_before_the_page_was_opened_and_outputs_of_running_requests_are_shown(
    server, open_page
):
    fetched(server, "/v1/completions", {"prompt": "count", "max_tokens": 40, "ignore_eos": True})
    page = open_page(server.url + "/#pipeline", cuts=True)  # its answer is stopped
    give_key(page)
    expect(page.locator(".steps .quiet")).to_contain_text(re.compile(r"^[\d,]{2,} steps"))
    page.evaluate("location.hash = '#chat'")  # as in the bar of addresses
    expect(page.locator("#chat")).to_be_visible()
    page.evaluate("location.hash = '#pipeline'")
    expect(page.locator("#pipeline")).to_be_visible()
    page.get_by_role("tab", name="Chat").click()
    option(page, "Of the request's body, as JSON", LONG)
    for _ in range(TRIES):
        if running_outputs(page):
            break
    else:
        raise AssertionError("no running request had outputs")


RUNNING = """() => new Promise((done) => {
  const body = document.querySelector(".requests tbody");
  const look = () => {
    for (const { cells } of body.rows) {
      if (cells[2].textContent === "runs" && /^[\\d,]+$/.test(cells[4].textContent)) {
        watching.disconnect();
        done(cells[4].textContent);
      }
    }
  };
  const watching = new MutationObserver(look);
  watching.observe(body, { childList: true, characterData: true, subtree: true });
  setTimeout(() => { watching.disconnect(); done(""); }, 20_000);
  look();
})"""


def running_outputs(page) -> str:
    """What is shown of a request that runs; "" if it has ended before."""
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("button", name="New conversation").click()
    ask(page, "Count from 3 to 12.")
    page.get_by_role("tab", name="Pipeline").click()
    shown = page.evaluate(RUNNING)
    page.get_by_role("tab", name="Chat").click()
    page.keyboard.press("Escape")
    expect(answers(page)).to_have_count(1)
    return shown


def test_every_endpoint_of_the_docs_is_tried_where_it_stands(
    server, open_page, no_violations, broken_words
):
    page = open_page(server.url + "/docs", color_scheme="dark", reduced_motion="reduce")
    no_violations(page, "nav", "section[id=post-v1-chat-completions]")  # all have these colours
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    no_violations(page)
    assert broken_words(page, ".card td:first-child") == []
    card = page.locator("section[id=post-v1-chat-completions]")
    expect(card.locator(".example")).to_contain_text(f"curl {server.url}/v1/chat/completions")
    card.get_by_role("button", name="Try it").click()
    expect(card.locator(".answered")).to_contain_text("401")
    page.get_by_label("API key").fill(KEY)
    card.get_by_role("button", name="Try it").click()
    expect(card.locator(".answered")).to_contain_text(STAGES)
    for form in page.locator("form.try[data-method=post]:has(textarea)").all():
        form.get_by_role("button").click()
        answered = form.locator("xpath=following-sibling::pre[@class='answered']")
        served = not re.search(
            "embeddings|score|rerank|lora", form.get_attribute("data-path") or ""
        )
        expect(answered).to_contain_text(re.compile(r"^200 " if served else r"^501 "))
    models = page.locator("section[id=get-v1-models]")
    models.get_by_role("button").click()
    expect(models.locator(".answered")).to_contain_text("pipeinfer-demo")


def test_the_docs_on_a_phone_fold_their_contents_and_send_the_key_nowhere(
    server, open_page, broken_words
):
    phone, desk = {"width": 390, "height": 844}, {"width": 1280, "height": 800}
    page = open_page(server.url + "/docs", viewport=phone)
    contents = page.get_by_role("navigation", name="Contents")
    link = contents.get_by_role("link", name="/v1/models", exact=False).first
    expect(link).to_be_hidden()
    page.get_by_text("Endpoints and types").click()
    expect(link).to_be_visible()
    cut = "(one) => [one.scrollHeight > one.clientHeight, one.scrollWidth > one.clientWidth]"
    assert contents.evaluate(cut) == [False, False]
    assert page.evaluate("() => document.documentElement.scrollWidth") <= phone["width"]
    assert broken_words(page, ".card td:first-child") == []
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    assert page.get_by_label("API key").evaluate("(field) => field.form !== null")
    assert page.url == server.url + "/docs" and page.get_by_label("API key").input_value() == KEY
    page.get_by_text("Endpoints and types").click()
    page.set_viewport_size(desk)
    expect(link).to_be_visible()
    expect(page.get_by_text("Endpoints and types")).to_be_hidden()
    vectors = contents.locator("h2:text-is('Vectors and scores') + ul li")
    expect(vectors.first).to_have_text("POST /v1/embeddings")


def test_a_killed_engine_is_seen_at_once_and_so_is_its_recovery(server, chat):
    chat.get_by_role("tab", name="Pipeline").click()
    engine = chat.locator(".stage.engine")
    expect(engine.locator(".state")).to_have_text("● ready")
    for restarts in range(1, TRIES):
        seconds, state = seen_after_kill(server, chat)
        assert "ready" not in state
        expect(engine.locator(".state")).to_have_text("● ready")
        expect(engine.locator(".life")).to_contain_text(f"{restarts} restart")
        if seconds < SILENCE:  # its supervisor says so; a machine that stalls may be later
            break
    assert seconds < SILENCE
    log = chat.get_by_role("log")
    expect(log).to_contain_text(re.compile(r"engine-0-0: a new process, \d+"))
    expect(log).to_contain_text(re.compile(r"engine-0-0: ready again after"))


def seen_after_kill(server, chat) -> tuple[float, str]:
    """(seconds until the page shows it, the state that it shows then) of an engine's death."""
    pid = server.pid("engine")
    changed = """() => new Promise((done) => {
      const state = document.querySelector(".stage.engine .state"), before = state.textContent;
      new MutationObserver(() => {
        if (state.textContent !== before) done([Date.now() / 1000, state.textContent]);
      }).observe(state, { childList: true, characterData: true, subtree: true });
    })"""
    chat.evaluate(f"() => {{ window.change = ({changed})(); }}")
    killed = chat.evaluate("() => Date.now() / 1000")
    os.kill(pid, signal.SIGKILL)
    seen, state = chat.evaluate("() => window.change")
    return seen - killed, state
