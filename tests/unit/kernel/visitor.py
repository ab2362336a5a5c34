"""What a browser does with the page, without one: cookies, origins, forms."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import requests

from tests.unit.kernel.agent_double import PATIENCE


class Form(HTMLParser):
    """The fields of the forms on a page, by the path that each is sent to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.forms: dict[str, dict[str, str]] = {}
        self._fields: dict[str, str] | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "form":
            self._fields = self.forms.setdefault(found.get("action") or "", {})
        elif tag == "input" and self._fields is not None and found.get("name"):
            self._fields[str(found["name"])] = found.get("value") or ""


class Visitor:
    """One browser, at one kernel."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = requests.Session()
        self.session.trust_env = False

    def close(self) -> None:
        self.session.close()

    def get(self, path: str = "/", follow: bool = False, **headers: str) -> requests.Response:
        return self.session.get(
            self.url + path, headers=_headers(headers), timeout=PATIENCE, allow_redirects=follow
        )

    def post(self, path: str, fields: dict[str, str], **headers: str) -> requests.Response:
        """Send a form as a browser would from this page, but for what ``headers`` says."""
        sent = {"Origin": self.url, "Sec-Fetch-Site": "same-origin", **_headers(headers)}
        return self.session.post(
            self.url + path,
            data=fields,
            headers={name: value for name, value in sent.items() if value},
            timeout=PATIENCE,
            allow_redirects=False,
        )

    def fill(self, page: str, action: str, **fields: str) -> requests.Response:
        """Open ``page``, fill in its form to ``action`` and send it."""
        return self.post(action, {**Form(self.get(page).text).forms[action], **fields})

    def log_in(self, token: str) -> requests.Response:
        return self.fill("/login", "/login", token=token)

    def cookies(self) -> dict[str, str]:
        return {c.name: c.value or "" for c in self.session.cookies}


def _headers(named: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in named.items()}


def words(html: str) -> str:
    """Return the text of a page in one line."""
    inside = re.sub(r"(?s)^.*<main[^>]*>|</main>.*$", "", html)
    return " ".join(re.sub(r"<[^>]+>", " ", inside).split())


def set_cookie(response: requests.Response) -> dict[str, Any]:
    """Return the attributes of the one cookie that an answer sets, names in lower case."""
    first, *attributes = response.headers["Set-Cookie"].split("; ")
    name, _, value = first.partition("=")
    flags = {a.partition("=")[0].lower(): a.partition("=")[2] or True for a in attributes}
    return {"name": name, "value": value, **flags}
