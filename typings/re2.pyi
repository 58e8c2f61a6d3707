# What is used of google-re2, which has no annotations.

class Options:
    max_mem: int
    never_capture: bool
    log_errors: bool

class Pattern:
    def fullmatch(self, text: str) -> object | None: ...

class error(Exception): ...  # noqa: N801, N818 - the library's name

def compile(pattern: str, options: Options | None = None) -> Pattern: ...  # noqa: A001
def escape(pattern: str) -> str: ...
