"""A visitor of the kernel's page without JavaScript: follows links, fills in forms, sends them."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from types import TracebackType
from urllib.parse import urljoin

import requests


@dataclasses.dataclass
class Form:
    """A form as a browser has it: what it sends, and what a person may put in.

    Attributes:
        action: where it is sent, as written.
        fields: what each field holds.
        choices: what may be chosen in each field that offers a choice.
        buttons: the name and value of each button that can be pressed, by its label.
    """

    action: str
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    choices: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    buttons: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)


class _Forms(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Form] = []
        self._within: Form | None = None
        self._select = ""
        self._option: dict[str, str | None] | None = None
        self._button: dict[str, str | None] | None = None
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form":
            assert (given.get("method") or "get").lower() in ("get", "post")
            self._within = Form(given.get("action") or "")
            self.found.append(self._within)
        if self._within is None:
            return
        if tag in ("input", "textarea"):
            self._within.fields[given["name"] or ""] = given.get("value") or ""
        elif tag == "select":
            self._select = given["name"] or ""
            self._within.choices[self._select] = []
        elif tag == "option":
            self._option, self._text = given, ""
        elif tag == "button" and "disabled" not in given:
            self._button, self._text = given, ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        form = self._within
        if form is None:
            return
        if tag == "option" and self._option is not None:
            value = self._option.get("value")
            value = self._text.strip() if value is None else value
            form.choices[self._select].append(value)
            # A browser sends the first option unless another is chosen.
            if self._select not in form.fields or "selected" in self._option:
                form.fields[self._select] = value
            self._option = None
        elif tag == "button" and self._button is not None:
            named = (self._button.get("name") or "", self._button.get("value") or "")
            form.buttons[self._text.strip()] = named
            self._button = None
        elif tag == "form":
            self._within = None


class PageVisitor:
    """One browser's worth of cookies on the page at ``url``; a context manager."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = requests.Session()
        self._at = url

    def __enter__(self) -> PageVisitor:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._session.close()

    def open(self, path: str) -> requests.Response:
        """Go to a page, and wherever it leads."""
        answer = self._session.get(urljoin(self._url, path), timeout=30)
        self._at = answer.url
        return answer

    def form(self, answer: requests.Response, action: str) -> Form:
        """Return the one form of a page that is sent to ``action``."""
        forms = _Forms()
        forms.feed(answer.text)
        forms.close()
        (found,) = (form for form in forms.found if form.action == action)
        return found

    def send(self, form: Form, button: str, **filled: str) -> requests.Response:
        """Fill in fields that are there, press a button that is there, and follow the answer."""
        for name, value in filled.items():
            assert name in form.fields, f"the form has no field {name!r}"
            if name in form.choices:
                assert value in form.choices[name], f"{name!r} offers {form.choices[name]}"
        name, value = form.buttons[button]
        pressed = {name: value} if name else {}
        headers = {"Origin": self._url, "Referer": self._at, "Sec-Fetch-Site": "same-origin"}
        answer = self._session.post(
            urljoin(self._at, form.action),
            {**form.fields, **filled, **pressed},
            headers=headers,
            timeout=30,
        )
        self._at = answer.url
        return answer
