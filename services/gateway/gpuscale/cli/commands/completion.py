"""`gpuscalectl completion`: scripts that let a shell complete commands, options and the names of what there is."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

ENTRY = "__complete"
"""The hidden command that the scripts call: `gpuscalectl __complete SHELL WORD...`, the last word being incomplete."""


class Shell(StrEnum):
    """Shells that a script can be had for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_BASH = """\
# source <(gpuscalectl completion bash)
_gpuscalectl() {
    local IFS=$'\\n'
    COMPREPLY=($(gpuscalectl __complete bash "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _gpuscalectl gpuscalectl
"""
_ZSH = """\
#compdef gpuscalectl
# source <(gpuscalectl completion zsh)
_gpuscalectl() {
    local -a found
    local line
    for line in "${(@f)$(gpuscalectl __complete zsh "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -n $line ]] && found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
    done
    if (( $#found )); then _describe -V gpuscalectl found; else _files; fi
}
compdef _gpuscalectl gpuscalectl
"""
_FISH = """\
# gpuscalectl completion fish | source
function __gpuscalectl_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l found (gpuscalectl __complete fish $words[2..-1] 2>/dev/null)
    if set -q found[1]
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c gpuscalectl -f -a '(__gpuscalectl_complete)'
"""
_SCRIPTS = {Shell.BASH: _BASH, Shell.ZSH: _ZSH, Shell.FISH: _FISH}


def completion(shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", show_default=False)]) -> None:
    """Write the script that completes commands, options and names; its first line says how it is used."""
    sys.stdout.write(_SCRIPTS[shell])
