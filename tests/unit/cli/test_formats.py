"""`-o`: forms that there are, and what is said about one that there is not."""

import pytest

from gpuscale.cli.grammar.jsonpath import Form, Format, parse_form, parse_path


@pytest.mark.parametrize("plain", ["table", "wide", "json", "yaml", "name", "jsonl"])
def test_a_plain_form(plain: str) -> None:
    assert parse_form(plain) == Form(Format(plain))


def test_forms_with_an_expression() -> None:
    assert parse_form("jsonpath={.a}").template == (parse_path(".a"),)
    assert parse_form("custom-columns=A:.a,B:b.c").columns == (
        ("A", parse_path(".a")),
        ("B", parse_path(".b.c")),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("jsn", "did you mean json"),
        ("bogus", "choose from table, wide"),
        ("json=x", "takes no expression"),
        ("jsonpath", "write it like jsonpath={.name}"),
        ("custom-columns=", "write it like custom-columns=NAME:.name"),
        ("custom-columns=NAME", "write it like NAME:.name"),
        ("jsonpath={.a[}", "is not a path"),
    ],
)
def test_what_is_no_form_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("{", r"\{")):
        parse_form(text)
