"""Paths, templates and output formats mean what they mean to kubectl."""

import pytest

from gpuscale.cli.grammar.jsonpath import Form, Format, find, parse_form, parse_path, parse_template, render

DATA = {
    "nodes": [
        {"name": "a", "state": "READY", "readyReplicas": 3, "bytes": "85899345920", "labels": {"x.y": "z"}},
        {"name": "b", "state": "LOST", "readyReplicas": 1, "bytes": "9"},
        {"name": "c", "state": "READY", "readyReplicas": 2, "tags": ["t1", "t2"]},
    ]
}


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (".nodes[*].name", ["a", "b", "c"]),
        ("{.nodes[*].name}", ["a", "b", "c"]),
        ("nodes[0].name", ["a"]),
        ("$.nodes[-1].name", ["c"]),
        (".nodes[0:2].name", ["a", "b"]),
        (".nodes[1:].name", ["b", "c"]),
        (".nodes[-2:-1].name", ["b"]),
        (".nodes[*].ready_replicas", [3, 1, 2]),
        (".nodes[*].labels['x.y']", ["z"]),
        ('.nodes[?(@.state=="READY")].name', ["a", "c"]),
        (".nodes[?(@.state!='READY')].name", ["b"]),
        (".nodes[?(@.readyReplicas>=2)].name", ["a", "c"]),
        (".nodes[?(@.readyReplicas<2)].name", ["b"]),
        (".nodes[?(@.bytes>100)].name", ["a"]),
        (".nodes[*].tags[*]", ["t1", "t2"]),
        (".nodes[0].labels.*", ["z"]),
        (".nodes[9].name", []),
        (".nothing.at.all", []),
        (".nodes.name", []),
        (".", [DATA]),
    ],
)
def test_a_path_leads_to_its_values(path: str, values: list[object]) -> None:
    assert find(parse_path(path), DATA) == values


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{.nodes[0].name}", "a"),
        (".nodes[*].name", "a b c"),
        ('{range .nodes[*]}{.name}{"\\t"}{.state}{"\\n"}{end}', "a\tREADY\nb\tLOST\nc\tREADY\n"),
        ("first: {.nodes[0].name}!", "first: a!"),
        ("{.nodes[0].labels}", '{"x.y": "z"}'),
        ("{.nodes[0].readyReplicas}", "3"),
        ("{range .nodes[2:]}{range .tags[*]}<{.}>{end}{end}", "<t1><t2>"),
        ("{.nothing}", ""),
    ],
)
def test_a_template_is_filled_in(template: str, text: str) -> None:
    assert render(parse_template(template), DATA) == text


@pytest.mark.parametrize(
    "text", [".a[", ".a[?(@.b)]", "{.a", "{range .a}{.b}", "{.a}{end}", "a b", ".a[x]", "}", "{.a}}"]
)
def test_what_is_no_path_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="'"):
        parse_template(text)


@pytest.mark.parametrize("plain", ["table", "wide", "json", "yaml", "name", "jsonl"])
def test_a_plain_form(plain: str) -> None:
    assert parse_form(plain) == Form(Format(plain))


def test_forms_with_an_expression() -> None:
    assert parse_form("jsonpath={.a}").template == (parse_path(".a"),)
    columns = (("A", parse_path(".a")), ("B", parse_path(".b.c")))
    assert parse_form("custom-columns=A:.a,B:b.c").columns == columns


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
