"""The page at `/`, in a real headless Chromium driven over WebDriver, against a stub that speaks the server's API."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

import lorry

pytestmark = pytest.mark.slow

UI = Path(lorry.__file__).parent / "server" / "ui"
CONTENT_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_SWITCHES = (
    "headless disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"
    " disable-sync disable-dev-shm-usage"
)
NO_FIGURE = "\N{EN DASH}"
DESKTOP, PHONE = (1280, 900), (390, 844)

ANSWERS = {
    "base-model": "The moon is a rock that goes around the earth.",
    "pirate": "Arrr, th' moon be a <b>shiny</b> doubloon 🌙!",
    "sql": "SELECT 'moon'; -- l'été & more",
}
CARDS: dict[str, dict[str, Any]] = {
    "base-model": {"parent": None},
    "pirate": {"rank": 4, "description": "Talks like a pirate.", "examples": ["What is the moon?"]},
    "sql": {"rank": 12, "description": "Answers in SQL.", "examples": ["How many moons?"]},
    "endless": {},
    "gone": {},
    "busy": {"rank": 8},
    "breaks": {},
    "team/odd ' name": {},
}


class Stub(ThreadingHTTPServer):
    """Answers with fixed tokens. Where `barrier` is set, no answer begins before all of them have been asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        self.forget()

    def forget(self) -> None:
        self.key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.barrier: threading.Barrier | None = None
        self.client_gone = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a connection is no error."""


class StubHandler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/v1"):
            cards = [{"id": name, "root": name, "parent": "base-model"} | card for name, card in CARDS.items()]
            return self._refuse_key() if self._lacks_key() else self._json(200, {"object": "list", "data": cards})
        if self.path == "/health":
            return self._json(200, {"status": "ok"})
        path = UI / ("index.html" if self.path == "/" else self.path.removeprefix("/ui/"))
        if path.parent != UI or not path.is_file():
            return self._error(404, "no such page")
        self._head(200, CONTENT_TYPES[path.suffix])
        self.wfile.write(path.read_bytes())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._lacks_key():
            return self._refuse_key()
        self.server.bodies.append(body)
        model = body["model"]
        if model == "gone":
            return self._error(404, "the model 'gone' does not exist")
        if model == "busy":
            return self._error(503, "the engine is starting", {"Retry-After": "7"})
        if self.server.barrier is not None:
            self.server.barrier.wait(10)
        self._head(200, "text/event-stream")
        if model == "endless":
            return self._stream_for_ever()
        words = [word + " " for word in ANSWERS.get(model, model).split()]
        for word in words:
            self._event({"choices": [{"index": 0, "delta": {"content": word}}]})
            time.sleep(0.01)
        if model == "breaks":
            return self._event({"error": {"message": "it broke half way", "code": "internal_error"}})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None})
        self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2 * len(words)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _stream_for_ever(self) -> None:
        try:
            while True:
                self._event({"choices": [{"index": 0, "delta": {"content": "on and "}}]})
                time.sleep(0.02)
        except OSError:
            self.server.client_gone.set()

    def _event(self, content: Any) -> None:
        data = b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
        for half in (data[: len(data) // 2], data[len(data) // 2 :]):  # the network cuts where it likes
            self.wfile.write(half)
            self.wfile.flush()

    def _lacks_key(self) -> bool:
        return self.server.key is not None and self.headers["Authorization"] != f"Bearer {self.server.key}"

    def _refuse_key(self) -> None:
        self._error(401, "the API key is missing or wrong")

    def _error(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        self._json(status, {"error": {"message": message, "code": None}}, headers)

    def _json(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        self._head(status, "application/json", headers)
        self.wfile.write(json.dumps(content).encode())

    def _head(self, status: int, content_type: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": content_type} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()


class Browser:
    """The few words of WebDriver that the tests need."""

    def __init__(self, driver_url: str, options: dict[str, Any]) -> None:
        self._http = httpx.Client(base_url=driver_url, timeout=60, trust_env=False)
        session = self._call("/session", capabilities={"alwaysMatch": {"goog:chromeOptions": options}})
        self._path = f"/session/{session['sessionId']}"

    def _call(self, path: str, **body: Any) -> Any:
        response = self._http.post(path, json=body)
        assert response.is_success, response.text
        return response.json()["value"]

    def close(self) -> None:
        self._http.delete(self._path)
        self._http.close()

    def open(self, url: str) -> None:
        self._call(f"{self._path}/url", url=url)

    def script(self, code: str, *arguments: Any) -> Any:
        return self._call(f"{self._path}/execute/sync", script=code, args=list(arguments))

    def type(self, selector: str, *keys: str) -> None:
        """As from a keyboard; `\\ue009` is Ctrl, held until the end."""
        found = self._call(f"{self._path}/element", using="css selector", value=selector)
        self._call(f"{self._path}/element/{next(iter(found.values()))}/value", text="".join(keys))

    def click(self, selector: str) -> None:
        found = self._call(f"{self._path}/element", using="css selector", value=selector)
        self._call(f"{self._path}/element/{next(iter(found.values()))}/click")

    def resize(self, width: int, height: int) -> None:
        command = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **command)

    def devtools(self, command: str, **params: Any) -> Any:
        return self._call(f"{self._path}/goog/cdp/execute", cmd=command, params=params)

    def errors(self) -> list[str]:
        """What the console holds of broken code and violated policies; refusals are for tests to provoke."""
        entries = self._call(f"{self._path}/se/log", type="browser")
        return [
            e["message"] for e in entries if e["level"] == "SEVERE" and "the server responded" not in e["message"]
        ]

    def wait(self, condition: str, *arguments: Any, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not self.script(f"return Boolean({condition})", *arguments):
            assert time.monotonic() < end, f"it did not come true: {condition}"
            time.sleep(0.02)

    def columns(self) -> dict[str, dict[str, Any]]:
        """By model: state, text, problem and figures."""
        return self.script("""const columns = Array.from(document.querySelectorAll("article"), (article) => {
            const get = (selector) => article.querySelector(selector).textContent;
            const problem = article.querySelector(".problem").hidden ? null : get(".problem p");
            const figures = Array.from(article.querySelectorAll("dd"), (figure) => figure.textContent);
            return [get("h3"), { state: get(".state"), text: get(".text"), problem, figures }];
        });
        return Object.fromEntries(columns);""")

    def choose(self, *models: str) -> None:
        self.script(
            """for (const box of document.querySelectorAll("#models input")) if (box.checked) box.click();
            for (const model of arguments) document.querySelector(`[data-model="${CSS.escape(model)}"]`).click();""",
            *models,
        )

    def ask(self, question: str, *models: str) -> None:
        self.choose(*models)
        self.script('document.querySelector("#question").value = ""')
        self.type("#question", question, "\ue009\ue007")  # Ctrl+Enter

    def wait_for_answers(self) -> dict[str, dict[str, Any]]:
        self.wait('document.querySelector("article") && document.querySelector("#stop").disabled')
        return self.columns()


@contextlib.contextmanager
def running_browser(chromium: str, driver: str, folder: Path) -> Iterator[Browser]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    switches = [*CHROMIUM_SWITCHES.split(), f"user-data-dir={folder}"] + ["no-sandbox"] * (os.geteuid() == 0)
    options = {"binary": chromium, "args": [f"--{switch}" for switch in switches]}
    with subprocess.Popen(
        [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(lambda: httpx.get(f"{url}/status", trust_env=False).json()["value"]["ready"])
            browser = Browser(url, options)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            process.terminate()


def _wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        assert time.monotonic() < end, "chromedriver did not start"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium and ChromeDriver (Debian: apt-get install chromium chromium-driver)")
    with running_browser(chromium, driver, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def shared_stub() -> Iterator[Stub]:
    with Stub() as stub:
        thread = threading.Thread(target=stub.serve_forever)
        thread.start()
        yield stub
        stub.shutdown()
        thread.join()


@pytest.fixture
def stub(shared_stub: Stub) -> Stub:
    shared_stub.forget()
    return shared_stub


@pytest.fixture
def page(browser: Browser, stub: Stub) -> Iterator[Browser]:
    """The page, freshly opened, with the list of models on it; no script error and no violated policy afterwards."""
    browser.resize(*DESKTOP)
    browser.open(stub.url)
    browser.wait('document.querySelectorAll("#models li").length === arguments[0]', len(CARDS))
    yield browser
    assert browser.errors() == []
    browser.open("about:blank")


def test_models_are_listed_with_rank_and_description(page: Browser):
    items = page.script('return Array.from(document.querySelectorAll("#models li"), (item) => item.innerText)')
    assert [item.split()[:2] for item in items[:3]] == [["base-model", "base"], ["pirate", "rank"], ["sql", "rank"]]
    assert "Talks like a pirate." in items[1]
    assert page.script('return document.querySelector("#num-chosen").textContent') == "6 of 8"
    assert page.script('return document.querySelectorAll("#models input:disabled").length') == 2


def test_base_and_adapters_answer_at_the_same_time(page: Browser, stub: Stub):
    stub.barrier = threading.Barrier(3)
    page.ask("What is the moon?", "base-model", "pirate", "sql")
    columns = page.wait_for_answers()
    assert list(columns) == ["base-model", "pirate", "sql"]
    for model, column in columns.items():
        assert column["text"] == ANSWERS[model] + " "  # the <b> of the pirate is text
        assert (column["state"], column["problem"]) == ("complete", None)
        first, rate, tokens = column["figures"]
        assert first.endswith("s")
        assert rate == NO_FIGURE or float(rate) > 0  # a busy machine hands over all in one packet
        assert int(tokens) == 2 * len(ANSWERS[model].split())  # as the server counts them
    together = page.script('return document.querySelector("#together").textContent')
    assert "tokens/s" in together
    assert f"{2 * sum(len(text.split()) for text in ANSWERS.values())} tokens in" in together
    assert page.script('return document.querySelector("#announcer").textContent').startswith("base-model: complete")
    for body in stub.bodies:
        assert body["messages"] == [{"role": "user", "content": "What is the moon?"}]
        assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 128, True)


def test_stop_ends_all_answers(page: Browser, stub: Stub):
    page.ask("Go on", "pirate", "endless")
    page.wait('document.querySelectorAll("article .text")[1].textContent.length > 20')
    page.click("#stop")
    columns = page.wait_for_answers()
    assert stub.client_gone.wait(5)
    assert columns["endless"]["state"] == "stopped"
    assert columns["endless"]["text"].startswith("on and on and ")
    assert columns["endless"]["problem"] is None
    assert page.script("return document.activeElement.id") == "question"


def test_a_new_question_replaces_answers_under_way(page: Browser, stub: Stub):
    page.ask("Go on", "endless")
    page.wait('document.querySelector("article .text").textContent')
    page.ask("What is the moon?", "sql")
    assert stub.client_gone.wait(5)
    columns = page.wait_for_answers()
    assert {model: column["state"] for model, column in columns.items()} == {"sql": "complete"}


def test_errors_are_shown_where_they_happen(page: Browser, stub: Stub):
    page.ask("What is the moon?", "pirate", "gone", "busy", "breaks")
    columns = page.wait_for_answers()
    assert columns["pirate"]["state"] == "complete"
    assert "404: the model 'gone' does not exist" in columns["gone"]["problem"]
    assert "503: the engine is starting" in columns["busy"]["problem"]
    assert "try again in 7 s" in columns["busy"]["problem"]
    assert columns["breaks"]["text"] == "breaks "
    assert "it broke half way" in columns["breaks"]["problem"]
    page.script('document.querySelectorAll("article .problem button")[2].click()')  # of `busy`: pirate is the first
    page.wait_for_answers()
    assert [body["model"] for body in stub.bodies].count("busy") == 2


def test_the_key_is_asked_for_and_sent(browser: Browser, stub: Stub):
    stub.key = "open sesame"
    browser.open(stub.url)
    browser.wait('!document.querySelector("#key-form").hidden')
    browser.type("#key", "wrong\ue007")
    browser.wait('document.querySelector("#key-note").textContent.includes("does not take")')
    browser.script('document.querySelector("#key").value = ""')
    browser.type("#key", "open sesame\ue007")
    browser.wait('document.querySelector("#key-form").hidden && document.querySelector("#models li")')
    browser.ask("What is the moon?", "pirate")
    assert browser.wait_for_answers()["pirate"]["state"] == "complete"
    curl = browser.script('return document.querySelector("#curl").textContent')
    assert "$API_KEY" in curl
    assert "sesame" not in curl
    browser.script("sessionStorage.clear()")


def test_snippets_run(page: Browser, stub: Stub):
    question = 'L\'été 🌙, "quoted" \\n $HOME?'
    odd = "team/odd ' name"
    page.choose("pirate", odd)
    page.script('document.querySelector("#question").value = arguments[0]', question)
    page.type("#question", " ")
    curl, python = page.script('return ["curl", "python"].map((id) => document.querySelector(`#${id}`).textContent)')
    compile(python, "snippet", "exec")
    assert python.count(json.dumps(question + " ", ensure_ascii=False)) == 1
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    subprocess.run(["bash", "-c", curl], check=True, capture_output=True, timeout=20)
    assert [body["model"] for body in stub.bodies] == ["pirate", odd]
    assert {body["messages"][0]["content"] for body in stub.bodies} == {question + " "}


def test_examples_of_the_chosen_adapters(page: Browser):
    examples = 'return Array.from(document.querySelectorAll("#examples button"), (button) => button.textContent)'
    page.choose("base-model", "sql")
    assert page.script(examples) == ["sql How many moons?"]
    page.choose("base-model")
    assert "What is the capital of France?" in page.script(examples)
    page.click("#examples button")
    assert page.script('return document.querySelector("#question").value') == "What is the moon?"


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_is_wider_than_the_screen(page: Browser, tmp_path: Path, size: tuple[int, int]):
    page.resize(*size)
    page.ask("What is the moon?", *list(CARDS)[:3], "gone")
    page.wait_for_answers()
    assert page.script("return document.documentElement.scrollWidth") <= size[0]
    shot = page.devtools("Page.captureScreenshot", captureBeyondViewport=True)
    (Path(os.environ.get("LORRY_SCREENSHOTS", tmp_path)) / f"page-{size[0]}.png").write_bytes(
        base64.b64decode(shot["data"])
    )
