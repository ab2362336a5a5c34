"""Types as users see them: mypy, strict, over a file of user code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import rebuno_sync

HERE = Path(__file__).parent
USER_CODE = HERE / "user_code.py"
MESSAGE = re.compile(r"^.*user_code\.py:(\d+): (note|error): (.*)$")
REVEALED = re.compile(r'^Revealed type is "(.*)"$')
CODE = re.compile(r"\[([a-z-]+)\]$")
EXPECTED = re.compile(r"# (reveals|error): (.*)$")


@pytest.fixture(scope="module")
def told() -> dict[int, list[tuple[str, str]]]:
    """What mypy says of each line: ``("reveals", type)`` or ``("error", code)``."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        "--no-pretty",
        "--config-file=",
        "--cache-dir=.mypy_cache/user_code",
        str(USER_CODE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.stderr == ""
    found: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for row in done.stdout.splitlines():
        match = MESSAGE.match(row)
        assert match is not None, f"mypy complains about something else: {row}"
        line, kind, text = int(match[1]), match[2], match[3]
        if kind == "error":
            code = CODE.search(text)
            assert code is not None, row
            found[line].append(("error", code[1]))
        elif revealed := REVEALED.match(text):
            found[line].append(("reveals", _plain(revealed[1])))
    return found


def _plain(revealed: str) -> str:
    """A revealed type without what differs between versions of mypy."""
    plain = re.sub(r"builtins\.|typing\.|\?", "", revealed).replace(" = ...", " =")
    return re.sub(r"Union\[([^\[\]]*)\]", lambda m: m[1].replace(", ", " | "), plain)


def test_types_and_mistakes(told: dict[int, list[tuple[str, str]]]) -> None:
    expected = {
        number: (match[1], match[2].strip())
        for number, line in enumerate(USER_CODE.read_text("utf-8").splitlines(), 1)
        if (match := EXPECTED.search(line))
    }
    assert len(expected) > 40
    assert {line for line in told if line not in expected} == set(), "mypy says more than expected"
    for line, told_of in expected.items():
        rows = told.get(line, [])
        assert told_of in rows, f"line {line}: {rows}"
        if told_of[0] == "reveals":
            assert rows == [told_of], f"line {line}: {rows}"


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(rebuno_sync.__file__).parent / "py.typed").exists()
