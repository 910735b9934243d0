"""The page's files as a browser gets them: headers, redirects, allowed hosts."""

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from serving.http.page import HEADERS
from serving.settings import Settings
from tests.serving.test_http_errors import refusal

pytestmark = pytest.mark.usefixtures("server")  # every test leaves it empty

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "serving" / "http" / "page_files"
FILES = {path.name: path.read_text() for path in sorted(FOLDER.iterdir())}
SCRIPTS = [name for name in FILES if name.endswith(".js")]
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def place_of(name: str) -> str:
    return "/page/" if name == "index.html" else f"/page/{name}"


@pytest.mark.parametrize("name", FILES)
def test_files_are_served_with_strict_headers(http, name):
    answer = http.get(place_of(name))
    assert answer.status_code == 200
    assert answer.text == FILES[name]
    assert answer.headers["content-type"] == f"{KINDS[name.rpartition('.')[2]]}; charset=utf-8"
    assert HEADERS.items() <= dict(answer.headers).items()


def test_the_policy_allows_this_server_only():
    policy = HEADERS["content-security-policy"].split("; ")
    own = {f"{name}-src 'self'" for name in ("script", "style", "connect")}
    none = {f"{name} 'none'" for name in ("default-src", "base-uri", "form-action")}
    none |= {"frame-ancestors 'none'", "trusted-types 'none'"}
    others = {"img-src 'self' data:", "require-trusted-types-for 'script'"}
    assert set(policy) == own | none | others
    assert HEADERS["x-content-type-options"] == "nosniff"
    assert HEADERS["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/", "/page"])
def test_the_root_redirects_to_the_page(http, path):
    answer = http.get(path)
    assert (answer.status_code, answer.headers["location"]) == (307, "page/")
    assert HEADERS.items() <= dict(answer.headers).items()
    assert http.get(path, follow_redirects=True).text == FILES["index.html"]


OTHERS = ("index.html", "page.py", "../app.py", "%2e%2e/app.py", "page.js/x")


@pytest.mark.parametrize("path", OTHERS)
def test_no_other_file_is_served(http, path):
    assert http.get(f"/page/{path}").status_code == 404


def test_files_need_no_token_and_data_does(server):
    with server.another_client(tokens=[b"open sesame"]) as http:
        for name in FILES:
            assert http.get(place_of(name)).status_code == 200
        assert http.get("/").status_code == 307
        for path in ("/metrics", "/v1/models", "/page/x", "/page/page.js/"):
            refusal(http.get(path), 401)


def test_files_are_refused_for_a_foreign_host(server):
    with server.another_client(allowed_hosts=[]) as http:
        for path in ("/", *map(place_of, FILES)):
            refusal(http.get(path, headers={"host": "evil.example"}), 403)
            assert http.get(path).status_code in (200, 307)


def test_the_page_can_be_left_out(server):
    with server.another_client(with_page=False) as http:
        for path in ("/", "/page", *map(place_of, FILES)):
            assert http.get(path).status_code == 404
        assert http.get("/health").status_code == 200
    assert Settings().page
    assert not Settings(page=False).page


def test_a_wheel_contains_the_files():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["serving"]
    packed = {path for pattern in patterns for path in (ROOT / "serving").glob(pattern)}
    assert set(FOLDER.iterdir()) <= packed


class References(HTMLParser):
    """Files that a page loads, and attributes that the policy forbids."""

    def __init__(self, text: str):
        super().__init__()
        self.files: set[str] = set()
        self.forbidden: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href") and not value.startswith("data:"):
                self.files.add(value)
            if name == "style" or name.startswith("on"):
                self.forbidden.append(f"{tag} {name}")


def test_files_refer_to_each_other_only():
    page = References(FILES["index.html"])
    assert page.files == {"page.css", "page.js"}
    assert page.forbidden == []
    for name in SCRIPTS:
        imported = re.findall(r'^import .* from "\./(.+)";$', FILES[name], re.MULTILINE)
        assert len(imported) == len(re.findall(r"^import ", FILES[name], re.MULTILINE))
        assert set(imported) <= FILES.keys()
    for name, text in FILES.items():
        allowed = {"http://www.w3.org/2000/svg"}  # a namespace, which is never loaded
        assert set(re.findall(r"https?://[\w./-]+", text)) <= allowed, name
