"""The page at `/`: what it is made of, and what a person does with it, in a real browser."""

import re
import shutil

import numpy as np
import pytest

import given_child
import httppage
from given_child import ANSWER
from given_front import DEADLINE_S, RunningFront, write_tokenizer_model
from given_images import write_empty_session
from given_store import flush, kept, new_store

selenium = pytest.importorskip("selenium", reason="selenium is not installed")

from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support import expected_conditions  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def front(model, tmp_path):
    (tmp_path / "saved").mkdir()
    with RunningFront(tmp_path, model, slot_save_path=str(tmp_path / "saved")) as front:
        yield front


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if not (BROWSER and DRIVER):
        pytest.skip("no browser: install chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for switch in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(switch)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """The page in a browser, by what is to be seen on it."""

    def __init__(self, browser, front):
        self.browser = browser
        browser.get(front.url)

    def all(self, css: str) -> list:
        return self.browser.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str):
        return self.browser.find_element(By.CSS_SELECTOR, css)

    def wait(self, condition, what: str):
        return WebDriverWait(self.browser, DEADLINE_S, poll_frequency=0.02).until(lambda _: condition(), what)

    def wait_text(self, css: str, text: str) -> None:
        """Read all at once: elements are replaced while one looks at them."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('\\n')"
        self.wait(lambda: text in self.browser.execute_script(script, css), f"{text!r} in {css}")

    def say(self, text: str) -> None:
        self.one("#text").send_keys(text + "\n")

    def press(self, name: str, label: str) -> None:
        path = f"//li[@data-name='{name}']//button[text()='{label}']"
        self.wait(lambda: self.browser.find_element(By.XPATH, path).is_enabled(), label)
        self.browser.find_element(By.XPATH, path).click()


@pytest.fixture
def page(chromium, front):
    chromium.get_log("browser")
    yield Page(chromium, front)
    problems = [entry["message"] for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [problem for problem in problems if "Content Security Policy" in problem or "Uncaught" in problem]


def test_the_page_asks_nobody_else_for_anything():
    assert not re.findall(r"(?:https?:)?//[a-z]|\b(?:src|@import|url\()", httppage.PAGE)
    assert re.findall(r"<link [^>]*>", httppage.PAGE) == ['<link rel="icon" href="data:,">']
    assert "innerHTML" not in httppage.PAGE


def test_the_policy_allows_one_script_and_one_style(front):
    answer = front.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["style-src"])
    assert policy["frame-ancestors"] == "'none'"


@pytest.mark.browser
def test_a_chat_is_streamed(front, page):
    page.wait_text("#model", "tiny")
    front.script("GEN", "@accept", "@text first <b>half</b>", "@wait go", "@text  and second", "@ids 257", "@done")
    page.say("hello")
    page.wait_text(".message.user", "hello")
    page.wait_text(".message.assistant", "first <b>half</b>")
    assert "second" not in page.one("#messages").text
    front.mark("go")
    page.wait_text(".message.assistant", "and second")
    page.wait_text(".note", "0 tokens reused")
    page.wait_text("#state", "tokens held")
    page.say("again")
    page.wait_text(".message.assistant:last-of-type, .message.assistant", ANSWER)
    # What the child was sent is the whole conversation.
    assert front.get("/slots").json()[0]["n_prompt_tokens"] > 100


@pytest.mark.browser
def test_thinking_is_shown_apart(front, page):
    front.script("GEN", "@accept", "@text <think>let me see</think>yes", "@ids 257", "@done")
    page.say("why?")
    page.wait_text(".message.assistant .words", "yes")
    page.wait_text(".message.assistant details", "let me see")


@pytest.mark.browser
def test_an_answer_can_be_stopped(front, page):
    front.script("GEN", "@accept", "@text so far", "@wait-stop", "@done")
    page.say("hello")
    page.wait_text(".message.assistant", "so far")
    page.one("#stop").click()
    front.wait_for(lambda: front.verbs()[-1] == "STOP", "STOP")
    page.wait(lambda: page.one("#send").is_displayed(), "the end")
    page.say("and on")
    page.wait_text(".message.assistant", ANSWER)


@pytest.mark.browser
def test_an_error_is_shown_and_the_question_kept(front, page):
    front.script("GEN", "ERR not today")
    page.say("hello")
    page.wait_text("#error", "not today")
    page.wait(lambda: page.one("#text").get_property("value") == "hello", "the question")
    assert not page.all(".message")


@pytest.mark.browser
def test_save_restore_and_delete(front, page):
    page.say("remember this")
    page.wait_text(".message.assistant", ANSWER)
    name = page.one("#name")
    name.clear()
    name.send_keys("my chat.bin")
    page.wait(lambda: page.one("#save button").is_enabled(), "the end of the answer")
    page.one("#save button").click()
    page.wait_text(".note", "to my chat.bin")
    saved = front.folder / "saved" / "my chat.bin"
    assert saved.exists()
    # The scripted child's file is none that the list would show; one with the real layout stands in for it.
    front.slot("save", "kept.bin")
    ids = (front.folder / "saved" / "kept.bin").read_bytes()
    saved.unlink()
    write_empty_session(saved, 1234)
    page.browser.refresh()
    page.wait_text("li .facts", "1234 tokens")
    page.wait_text("li .facts", "just now")
    page.wait_text("li .facts .match", "matches")
    page.wait_text(".message.assistant", ANSWER)
    front.slot("erase")
    page.browser.refresh()
    page.wait_text("#state", "0 of")
    assert page.all(".message") == []
    front.script("RESTORE", "RESTORED 1234 567 8.9")
    front.script("TOKENS", held(["user", "remember this"], ["assistant", ANSWER]))
    page.press("my chat.bin", "Restore")
    page.wait_text(".message.user", "remember this")
    page.wait_text(".message.assistant", ANSWER)
    page.wait_text(".note", "restored 1234 tokens")
    page.wait_text("#state", "1234 of")
    page.press("my chat.bin", "Delete")
    page.browser.switch_to.alert.dismiss()
    page.press("my chat.bin", "Delete")
    page.browser.switch_to.alert.accept()
    page.wait(lambda: not page.all("li[data-name='my chat.bin']"), "the file to go")
    assert not saved.exists()
    assert (front.folder / "saved" / "kept.bin").read_bytes() == ids


def held(*turns) -> str:
    """The answer to TOKENS of a child that holds these turns."""
    ids = given_child.to_ids("".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns))
    return f"TOKENS {len(ids)} {','.join(map(str, ids))}"


def save_as(page, name: str) -> None:
    page.wait(lambda: page.one("#save button").is_enabled(), "the end of what runs")
    page.one("#name").clear()
    page.one("#name").send_keys(name)
    page.one("#save button").click()


def words(page) -> list[str]:
    return [message.text for message in page.all(".message")]


@pytest.mark.browser
def test_a_reload_and_saving_again_keep_the_words(front, page):
    page.say("remember this")
    page.wait_text(".note", "tokens reused")
    save_as(page, "a.bin")
    page.wait_text(".note", "to a.bin")
    page.browser.refresh()
    page.wait_text(".message.assistant", ANSWER)
    save_as(page, "a.bin")
    page.wait(lambda: alert(page), "the question")
    page.browser.switch_to.alert.accept()
    page.wait_text(".note", "to a.bin")
    front.chat("something else")
    front.slot("restore", "a.bin")
    page.browser.refresh()
    page.wait_text(".message.assistant", ANSWER)
    assert words(page) == ["remember this", ANSWER]
    assert page.browser.execute_script("return localStorage.length") == 0


def alert(page) -> bool:
    return bool(expected_conditions.alert_is_present()(page.browser))


@pytest.mark.browser
def test_an_existing_file_is_replaced_only_when_asked(front, page):
    front.chat("of another")
    front.slot("save", "a.bin")
    before = (front.folder / "saved" / "a.bin").read_bytes()
    page.say("mine")
    page.wait_text(".note", "tokens reused")
    save_as(page, "a.bin")
    page.wait(lambda: alert(page), "the question")
    page.browser.switch_to.alert.dismiss()
    page.wait(lambda: page.one("#save button").is_enabled(), "the end")
    assert (front.folder / "saved" / "a.bin").read_bytes() == before


@pytest.mark.browser
def test_what_another_client_said_is_not_filed_under_the_words_of_this_page(front, page):
    page.say("mine")
    page.wait_text(".note", "tokens reused")
    page.wait(lambda: page.one("#send").is_displayed(), "the end")
    front.chat("theirs")
    save_as(page, "a.bin")
    page.wait_text(".note", "to a.bin")
    assert words(page) == ["theirs", ANSWER]
    page.one("#back").click()
    assert words(page) == ["mine", ANSWER]
    page.browser.refresh()
    page.wait_text(".message.user", "theirs")


@pytest.mark.browser
def test_another_clients_conversation_is_offered(front, page):
    page.say("mine")
    page.wait_text(".note", "tokens reused")
    page.wait(lambda: page.one("#send").is_displayed(), "the end")
    page.wait_text("#state", "ready")
    front.chat("theirs")
    page.browser.execute_script("look()")
    page.wait(lambda: page.one("#foreign").is_displayed(), "the offer")
    assert words(page) == ["mine", ANSWER]
    page.one("#show").click()
    page.wait_text(".message.user", "theirs")
    page.say("and on")
    page.wait_text(".message.user", "and on")
    front.wait_for(lambda: len(front.verbs()) >= 4, "the request")


@pytest.mark.browser
def test_what_has_no_turns_is_shown_as_text(front, page):
    front.post("/completion", {"prompt": "once <b>upon</b>", "n_predict": 2})
    page.browser.refresh()
    page.wait_text(".message.raw", "once <b>upon</b>")


@pytest.mark.browser
def test_what_takes_long_is_said(front, page):
    front.script("GEN", "RESUME 0", "PP 512 9000 1.0 1.0", "@wait go", "PP 9000 9000 1.0 1.0", "@text x", "@done")
    page.say("a long one")
    page.wait_text("#activity", "reading the prompt: 512 of 9000 tokens")
    page.wait_text("#state", "reading")
    front.mark("go")
    page.wait_text(".note", "tokens reused")
    page.wait(lambda: page.one("#activity").text == "", "the line to go")
    front.script("GEN", "@accept", "@text abc", "@mark begun", "@wait on", "@done")
    with front.meanwhile(front.chat):
        front.wait_mark("begun")
        page.say("behind another")
        page.wait_text("#activity", "waiting for its turn: another answer is being written, 3 tokens")
        front.mark("on")
    page.wait_text(".message.assistant:last-of-type, .message.assistant", ANSWER)


@pytest.mark.browser
def test_files_of_others_are_marked(front, chromium):
    write_empty_session(front.folder / "saved" / "model.bin", 5, model=1)
    write_empty_session(front.folder / "saved" / "settings.bin", 6, config=1)
    (front.folder / "saved" / "damaged.bin").write_bytes(b"STRSESS\x01" + bytes(20))
    page = Page(chromium, front)
    page.wait_text("li[data-name='model.bin'] .mismatch", "of another model")
    page.wait_text("li[data-name='settings.bin'] .mismatch", "of other settings")
    page.wait(lambda: page.one("li[data-name='damaged.bin'] .mismatch").text, "what is wrong")
    front.script("RESTORE", "SERR invalid 0 it belongs to another model")
    page.press("model.bin", "Restore")
    page.wait_text("#error", "it belongs to another model")


@pytest.mark.browser
def test_progress_is_a_bar(front, page):
    front.chat()
    front.script("SAVE", "SWAIT capture 60", "SESSION 0 1048576", "SESSION 524288 1048576", "@wait go", "@default")
    page.wait(lambda: page.one("#save button").is_enabled(), "the button")
    page.one("#save button").click()
    page.wait_text("#doing", "512.0 KiB of 1.0 MiB")
    assert float(page.one("progress").get_property("value")) == 0.5
    assert not page.one("#save button").is_enabled()
    front.mark("go")
    page.wait(lambda: not page.one("#progress").is_displayed(), "the bar to go")


@pytest.mark.browser
def test_a_key_is_asked_for(model, tmp_path, chromium):
    with RunningFront(tmp_path, model, api_key="sesame") as front:
        page = Page(chromium, front)
        for key in ("wrong", "sesame"):
            page.wait(lambda: page.one("#locked").get_property("open"), "the question")
            page.one("#key").clear()
            page.one("#key").send_keys(key + "\n")
        page.wait_text("#model", "tiny")
        page.wait_text("#sessions", "--slot-save-path")
        page.say("hello")
        page.wait_text(".message.assistant", ANSWER)


# --- Stored conversations ---


@pytest.fixture
def storing(model, tmp_path):
    """A front with a store in which two chats are kept, and without a folder for files."""
    store = new_store(tmp_path / "store")
    for question in ("what is <b>ten</b>?", "who are you?"):
        words = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{ANSWER}"
        ids = np.array(given_child.to_ids(words), np.int32)
        flush(store, kept(ids, [len(ids)], label=question))
    with RunningFront(tmp_path, model, store=str(tmp_path / "store")) as front:
        yield front


@pytest.mark.browser
def test_a_stored_conversation_is_opened_and_gone_on_with(storing, chromium):
    page = Page(chromium, storing)
    page.wait_text("#conversations .name", "what is <b>ten</b>?")
    page.wait_text("#conversations .name", "who are you?")
    assert not page.one("#files").is_displayed()
    (name,) = (entry["id"] for entry in storing.get("/sessions").json()["data"] if "ten" in entry["label"])
    page.press(name, "Open")
    page.wait_text(".message.user", "what is <b>ten</b>?")
    page.wait_text(".message.assistant", ANSWER)
    page.wait_text(".note", "tokens are kept")
    page.say("and eleven?")
    storing.wait_for(lambda: any(line.startswith("GEN") for line in storing.verbs()), "GEN")
    asked = next(line for line in storing.verbs() if line.startswith("GEN")).rpartition(" ")[2]
    held = ",".join(map(str, given_child.to_ids(f"what is <b>ten</b>?<|im_end|>\n<|im_start|>assistant\n{ANSWER}")))
    assert held in asked


@pytest.mark.browser
def test_a_stored_conversation_is_deleted_after_a_question(storing, chromium):
    page = Page(chromium, storing)
    page.wait_text("#conversations .name", "who are you?")
    (name,) = (entry["id"] for entry in storing.get("/sessions").json()["data"] if "who" in entry["label"])
    page.press(name, "Delete")
    WebDriverWait(chromium, DEADLINE_S).until(expected_conditions.alert_is_present()).accept()
    page.wait(lambda: len(page.all("#conversations li")) == 1, "one conversation")
    assert [entry["label"] for entry in storing.get("/sessions").json()["data"]] == ["what is <b>ten</b>?"]
