"""The page in headless Chromium: a person sees what the API answers."""

import contextlib
import os
import shutil
import ssl
from collections.abc import Iterator

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from serving.tls import Certificates
from tests.serving.certificates import authority, signed
from tests.serving.drafters import known_text, known_text_engine
from tests.serving.live import LiveServer
from tests.waiting import eventually

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)",
    ),
]
PROMPT = "hello there"
NUM_TOKENS = 24


class Page:
    """The page in one tab."""

    def __init__(self, driver: webdriver.Chrome, address: str, scheme: str = "http"):
        self.driver = driver
        size = dict(width=1280, height=900, deviceScaleFactor=1, mobile=False)
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get_log("browser")  # drops what other pages logged
        driver.get(f"{scheme}://{address}/")

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """With all its spaces, which WebElement.text does not keep; without what the style adds."""
        return self.one(selector).get_property("textContent")

    def run(self, script: str) -> object:
        return self.driver.execute_script(f"return {script}")

    def fill(self, selector: str, value: object) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(str(value))

    def ask(self, prompt: str = PROMPT, *, button: str = "#run", **fields: object) -> None:
        """Fills the form, presses the button, and waits until the answer has ended."""
        self.await_model()
        self.fill("#prompt", prompt)
        for name, value in (dict(max_tokens=NUM_TOKENS) | fields).items():
            self.fill(f"#{name.replace('_', '-')}", value)
        self.one(button).click()
        self.await_end()

    def await_model(self) -> None:
        eventually(lambda: self.text("#model"), "the page shows the model")

    def await_end(self) -> None:
        eventually(
            lambda: self.run("document.body.dataset.busy") == "false", "the answer has ended"
        )

    def figure(self, name: str, run: int = 0) -> str:
        """A figure of an answer."""
        pairs = self.run(
            f"[...document.querySelectorAll('.run')[{run}].querySelectorAll('.figures div')]"
            ".map(div => [...div.children].map(child => child.textContent))"
        )
        return dict(pairs)[name]

    def check_quiet(self) -> None:
        """Fails if the console has errors or warnings; a violated policy is one."""
        assert self.driver.get_log("browser") == []


@pytest.fixture(scope="module")
def driver():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-proxy-server",
    ):
        options.add_argument(argument)
    options.add_argument("--ignore-certificate-errors")  # the tests' own authority
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # it needs a user other than root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def live(target, tokenizer):
    text = known_text(target, tokenizer.encode(PROMPT))
    with LiveServer(known_text_engine(target, tokenizer, text), http=True) as server:
        yield server


@pytest.fixture
def page(server, driver) -> Iterator[Page]:
    yield Page(driver, server.http_address)
    driver.get("about:blank")  # a page would go on reading metrics


def answer_of(server: LiveServer, **changes) -> dict:
    """The API's answer to the page's request."""
    body = dict(prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, return_rounds=True)
    return server.post("/v1/completions", **body | changes).json()


def fates(rounds: list[dict]) -> list[str]:
    """The fate of each token, from its definition."""
    found = []
    for one in rounds:
        found += ["accepted"] * one["accepted"]
        own = "bonus" if one["accepted"] == len(one["drafts"]) else "correction"
        found += [own if one["drafts"] else "plain"] * (one["tokens"] - one["accepted"])
    return found


def test_tokens_and_counts_are_those_of_the_api(server, page):
    answer = answer_of(server)
    (choice,), usage = answer["choices"], answer["usage"]
    page.ask()
    assert page.text(".rounds") == choice["text"]
    assert page.text(".prompt") == PROMPT
    shown = page.run("[...document.querySelectorAll('.rounds .token')].map(t => t.classList[1])")
    assert shown == fates(choice["rounds"])
    assert set(shown) == {"accepted", "correction", "bonus", "plain"}
    texts = page.run("[...document.querySelectorAll('.rounds .token')].map(t => t.textContent)")
    assert texts == [piece for one in choice["rounds"] for piece in one["texts"]]
    assert page.figure("Tokens") == str(usage["completion_tokens"]) == str(len(shown))
    details = usage["completion_tokens_details"]
    accepted, refused = (details[f"{x}_prediction_tokens"] for x in ("accepted", "rejected"))
    assert page.figure("Drafts accepted") == f"{accepted} of {accepted + refused}"
    block = answer["metrics"]["speculative_decoding"]
    assert page.figure("Tokens per round (AL)") == f"{block['mean_acceptance_length']:.2f}"
    assert page.figure("Rounds") == str(block["num_spec_steps"])
    counts = sorted({len(one["drafts"]) for one in choice["rounds"][1:]})
    k = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    assert page.text(".run h2").endswith(f"K = {k}")
    assert len(page.all(".run .positions tr")) == block["num_spec_tokens"]
    page.check_quiet()


def test_the_drafts_of_a_round_show_under_the_pointer_and_by_keyboard(server, page):
    rounds = answer_of(server)["choices"][0]["rounds"]
    page.ask()
    place = next(i for i, one in enumerate(rounds) if 0 < one["accepted"] < len(one["drafts"]))
    webdriver.ActionChains(page.driver).move_to_element(page.all(".round")[place]).perform()

    def shown(kind: str) -> list[str]:
        return page.run(f"[...document.querySelectorAll('{kind}')].map(t => t.textContent)")

    accepted, drafts = rounds[place]["accepted"], rounds[place]["drafts"]
    visible = lambda texts: [text.replace(" ", "·").replace("\n", "↵") for text in texts]
    assert shown(".round-detail del") == visible(drafts[accepted:])
    assert shown(".round-detail .accepted") == visible(drafts[:accepted])
    page.one("#run").send_keys(Keys.TAB)  # from the last button to the first round
    assert page.text(".round-detail p").startswith("The prompt's pass")
    for key, index in ((Keys.ARROW_RIGHT, 1), (Keys.END, len(rounds) - 1), (Keys.ARROW_LEFT, -2)):
        page.driver.switch_to.active_element.send_keys(key)
        drafts = rounds[index]["drafts"]
        assert f": {len(drafts)} drafts, " in page.text(".round-detail p")
        assert page.driver.switch_to.active_element == page.all(".round")[index]
    page.check_quiet()


def test_the_race_finds_equal_texts(server, page):
    rounds = answer_of(server)["choices"][0]["rounds"]
    page.ask(button="#race", temperature=1)  # a race is greedy all the same
    plain, drafted = (one.get_property("textContent") for one in page.all(".rounds"))
    assert plain == drafted == answer_of(server)["choices"][0]["text"]
    assert page.one("#verdict").get_attribute("data-equal") == "true"
    num_tokens = sum(one["tokens"] for one in rounds)
    counts = (
        f"{num_tokens} tokens took {num_tokens - 1} rounds without drafts and {len(rounds) - 1}"
    )
    assert page.text("#verdict").startswith(f"Equal text. {counts} with them")
    assert [page.figure("Rounds", run) for run in (0, 1)] == [
        str(num_tokens - 1),
        str(len(rounds) - 1),
    ]
    page.one(
        "#verdict button"
    ).click()  # the replay hides what comes later, and ends with all of it
    assert page.all(".future")
    eventually(lambda: not page.all(".future"), "the replay has ended")
    ends = [one.get_property("textContent") for one in page.all(".progress")]
    assert ends == [f"round {num_tokens - 1}", f"ended after {len(rounds) - 1} rounds"]
    page.check_quiet()


def test_text_is_never_html(server, page):
    prompt = "<img src=x onerror=document.title=1>"
    page.ask(prompt)
    assert page.text(".prompt") == prompt
    assert page.all("img") == []
    assert page.driver.title == "peagle-jax"
    assert page.text(".rounds") == answer_of(server, prompt=prompt)["choices"][0]["text"]
    with pytest.raises(Exception, match="TrustedHTML"):
        page.run("document.body.innerHTML = '<p>'")


def test_an_answer_can_be_stopped(server, page):
    page.await_model()
    page.fill("#max-tokens", 80)
    with server.paced() as pace:
        page.one("#run").click()
        pace.release(3)
        eventually(lambda: page.text(".rounds"), "the first token shows")
        page.one("#stop").click()
        page.await_end()
        server.check_freed(pace)
    assert page.text(".progress") == "stopped by you"
    assert not page.one("#problem").is_displayed()


@contextlib.contextmanager
def secured(server: LiveServer, folder) -> Iterator[str]:
    """The address of the same server with TLS and a token."""
    pair = signed(folder, "server", authority(folder, "ca"))
    certificates = Certificates(pair.cert, pair.key)
    with server.another_http(tokens=[b"open sesame"], certificates=certificates) as address:
        unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        assert httpx.get(f"https://{address}/v1/models", verify=unverified).status_code == 401
        yield address


def test_the_page_requests_a_token_once(server, driver, tmp_path):
    with secured(server, tmp_path) as address:
        page = Page(driver, address, "https")
        for token in ("wrong", "open sesame"):
            eventually(lambda: page.one("#token-dialog").get_property("open"), "it asks")
            page.fill("#token", token)
            page.one("#token").send_keys(Keys.ENTER)
            if token == "wrong":
                eventually(lambda: "does not know" in page.text("#token-note"))
        page.ask()
        assert page.text(".rounds") == answer_of(server)["choices"][0]["text"]
        driver.refresh()
        page.ask()  # the tab remembers the token
        assert not page.one("#token-dialog").get_property("open")
        assert page.run("localStorage.length") == 0
        assert page.run("document.cookie") == ""
        driver.get("about:blank")
