"""A program that is written out in a test: forked (`tests.support.up.Typed`), it costs no second of imports."""


def main(arguments: list[str]) -> None:
    """Be the program whose text this is."""
    exec(compile(arguments[0], "<program>", "exec"), {"__name__": "__main__"})
