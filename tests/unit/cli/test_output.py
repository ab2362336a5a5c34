"""What is printed: JSON that programs can rely on, text that cannot steer a terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from rebuno_sync.cli.output import Output, compact, json_text, one_line, plain, pretty, visible
from rebuno_sync.wire import Execution, decode


def output_on(width: int, *, terminal: bool = True) -> tuple[Output, io.StringIO]:
    file = io.StringIO()
    output = Output(json=False)
    output.__dict__["console"] = Console(
        file=file,
        width=width,
        force_terminal=terminal,
        color_system=None,
        highlight=False,
        markup=False,
        legacy_windows=False,
    )
    return output, file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ✔ text", "plain ✔ text"),
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("a\rb\x07\x00", "a␍b␇␀"),
        ("\x9b31m", "\ufffd31m"),
        ("abc\u202etxt.exe\u2066", "abc\ufffdtxt.exe\ufffd"),
        ("\x7f", "␡"),
        ("half \ud800 pair", "half \ufffd pair"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
    ],
)
def test_nothing_that_steers_a_terminal_passes(text: str, expected: str) -> None:
    assert visible(text) == expected


def test_one_line_is_one_line() -> None:
    assert one_line(" a \n\n  b\tc\r\nd ") == "a b c d"


def test_a_value_is_cut_to_its_width() -> None:
    assert compact({"a": [1, 2.0, None]}) == '{"a":[1,2.0,null]}'
    assert compact("x" * 100, 10) == '"xxxxxxxx…'
    assert len(compact("x" * 100, 10)) == 10


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '{"a":1.5e300}', "9" * 5000, "[" * 300 + "]" * 300, '"\\u001b[2J"']
)
def test_json_that_other_kernels_send_is_printed_as_json(text: str) -> None:
    value = decode(text.encode())
    printed = json_text(value).encode("utf-8")
    assert repr(decode(printed)) == repr(value) if len(text) < 5000 else decode(printed) == value
    assert b"\n" not in printed
    assert pretty(value)


def test_the_json_of_a_model_has_every_known_field_and_what_the_kernel_added() -> None:
    execution = Execution.from_json(
        {"id": "e", "agent_id": "a", "status": "running", "fork_seq": 3}
    )
    data = json.loads(json_text(plain(execution)))
    assert data["fork_seq"] == 3
    assert data["output"] is None
    assert data["failure_reason"] == ""
    assert list(data)[:3] == ["id", "agent_id", "status"]
    assert "extra" not in data


def test_markup_is_text() -> None:
    output, file = output_on(80)
    output.line("[red]no[/red] :smile: [link=http://x]", ("y", "bold"))
    assert file.getvalue() == "[red]no[/red] :smile: [link=http://x]y\n"


def test_a_table_on_a_wide_terminal_has_one_line_a_row() -> None:
    output, file = output_on(80)
    output.table(("id", "status"), [("0" * 36, "failed\n\x1b[2J")], empty="nothing")
    table = [line.rstrip() for line in file.getvalue().splitlines()]
    assert table == [f"id{'':36}status", f"{'0' * 36}  failed ␛[2J"]


def test_only_the_last_column_is_folded() -> None:
    output, file = output_on(60)
    output.table(("id", "what"), [("0" * 30, "x" * 50)], empty="nothing")
    table = [line.rstrip() for line in file.getvalue().splitlines()]
    assert table == [f"id{'':30}what", f"{'0' * 30}  {'x' * 28}", f"{'':32}{'x' * 22}"]


def test_on_a_narrow_terminal_every_id_can_still_be_copied() -> None:
    output, file = output_on(30)
    rows = [("01a227b0-48d3-7c2b-a9b2-049c1948f144", "completed"), ("second", "failed")]
    output.table(("id", "status"), rows, empty="nothing")
    assert file.getvalue() == (
        "id: 01a227b0-48d3-7c2b-a9b2-049c1948f144\nstatus: completed\n\n"
        "id: second\nstatus: failed\n"
    )


def test_without_a_terminal_nothing_is_cut_and_nothing_padded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "x" * 300
    Output(json=False).table(("id", "what"), [("1", long), ("22", "short")], empty="nothing")
    assert capsys.readouterr().out == f"id  what\n1   {long}\n22  short\n"


def test_an_empty_table_says_so_beside_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=False).table(("id",), [], empty="There are none.")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "There are none.\n")


def test_values_of_several_lines_are_indented() -> None:
    output, file = output_on(80)
    output.fields([("status", "failed"), ("input", '{\n  "a": 1\n}')])
    assert file.getvalue() == 'status: failed\ninput: \n  {\n    "a": 1\n  }\n'


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_no_color_is_honoured(
    no_color: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    file = io.StringIO()
    output = Output(json=False)
    monkeypatch.setattr("sys.stdout", file)
    monkeypatch.setattr(file, "isatty", lambda: True, raising=False)
    output.line(("text", "red"))
    assert ("\x1b[31m" in file.getvalue()) is coloured
