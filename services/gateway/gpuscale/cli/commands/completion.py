"""`gpuscalectl completion`: the script by which a shell completes commands, options and names of resources.

The scripts are click's. Commands provide the words: `names_of` and its neighbours in `gpuscale.cli.console.command`.
"""

import re
import sys

import click
from click import shell_completion as shells

from gpuscale.cli.console.command import PROGRAM, Session, command
from gpuscale.cli.console.errors import ExitCode

VARIABLE = "_GPUSCALECTL_COMPLETE"
"""Set by the scripts, to `bash_complete` and the like, when they request completions."""
SHELLS = ("bash", "zsh", "fish")


class _Bash(shells.BashComplete):
    """Bash, which splits `--output=json` and `host:7070` into three words each."""

    def get_completion_args(self) -> tuple[list[str], str]:
        words, last = super().get_completion_args()
        joined: list[str] = []
        for word in [*words, last]:
            if joined and (re.fullmatch("[:=]+", word) or joined[-1].endswith((":", "="))):
                joined[-1] += word
            else:
                joined.append(word)
        return joined[:-1], joined[-1]


class _WholeWords(shells.ShellComplete):
    """A shell that puts what it is told in place of the whole word, also of `--output=j`."""

    def get_completions(self, args: list[str], incomplete: str) -> list[shells.CompletionItem]:
        option, equals, _ = incomplete.partition("=")
        found = super().get_completions(args, incomplete)
        for one in found if equals and option.startswith("--") else ():
            one.value = f"{option}={one.value}"
        return found


class _Zsh(_WholeWords, shells.ZshComplete):
    """Zsh."""


class _Fish(_WholeWords, shells.FishComplete):
    """Fish; click's script cuts a word and its meaning at the first comma of either."""

    source_template = shells.FishComplete.source_template.replace('split ","', 'split --max 1 ","')


shells.add_completion_class(_Bash, "bash")
shells.add_completion_class(_Zsh, "zsh")
shells.add_completion_class(_Fish, "fish")


def complete(root: click.Command, instruction: str) -> int:
    """Write completions for the shell in `instruction`, such as `bash_complete`; returns the exit code."""
    made = shells.get_completion_class(instruction.partition("_")[0])
    if made is None:
        return ExitCode.USAGE
    found = made(root, {}, PROGRAM, VARIABLE).complete()
    sys.stdout.write(f"{found}\n" if found else "")
    return ExitCode.OK


@command("completion bash")
@click.argument("shell", type=click.Choice(SHELLS), metavar="bash|zsh|fish")
@click.pass_context
def completion(context: click.Context, _session: Session, shell: str) -> None:
    """Write the script that completes commands, options and names. To use it: `source <(gpuscalectl completion bash)`."""
    made = shells.get_completion_class(shell)
    if made is not None:
        sys.stdout.write(made(context.find_root().command, {}, PROGRAM, VARIABLE).source())
