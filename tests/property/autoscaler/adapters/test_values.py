"""Whatever value the API gives, it fills its place within one argument and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.autoscaler.adapters.engine import ReplicaOrder
from gpuscale.autoscaler.adapters.templates import CommandTemplate, check_command, launch, parse_argument

PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=100).filter(
    lambda text: text[:1] != "-"
)


@given(value=PRINTABLE)
def test_no_value_changes_the_number_of_arguments_or_any_other_argument(value: str) -> None:
    template = CommandTemplate(command=("/bin/prog", "--first", "{queue}", "x{queue}y", "last"))
    order = ReplicaOrder("endpoints/jobs/replicas/r1", "endpoints/jobs", {"queue": value})
    found = launch("worker", template, order, "/bin/python", {})
    assert found.argv == ("/bin/prog", "--first", value, f"x{value}y", "last")
    assert value == "" or value not in found.env.values() or value in {"0", order.replica, order.endpoint}


@given(text=st.text("{}:abc12 -_/", max_size=30))
def test_an_argument_is_read_whole_or_refused(text: str) -> None:
    """Texts and placeholders in a row are the argument again: no piece of it gets lost."""
    try:
        check_command(["/bin/prog", text])
    except ValueError:
        return
    argument = parse_argument(text)
    written = "".join(
        part.replace("{", "{{").replace("}", "}}")
        if isinstance(part, str)
        else f"{{{part.name}:int}}"
        if part.integer
        else f"{{{part.name}}}"
        for part in argument
    )
    assert written == text
