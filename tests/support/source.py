"""A program that is written out in a test: forked (`tests.support.up.Typed`), it costs no second of imports."""


def main(arguments: list[str]) -> None:
    exec(compile(arguments[0], "<program>", "exec"), {"__name__": "__main__"})
