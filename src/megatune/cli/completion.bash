# Completions of megatune for bash, by `megatune completion bash`.
_megatune() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} verb=${COMP_WORDS[1]}
    local key= before= words= flags= settings= below=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@VERBS@ --help --version" -- "$cur"))
        return
    fi
    # bash splits key=value into three words, zsh does not.
    if [[ $cur == "=" ]]; then
        key=$prev cur=
    elif [[ $prev == "=" ]]; then
        key=${COMP_WORDS[COMP_CWORD-2]}
    elif [[ $cur == *=* ]]; then
        key=${cur%%=*} before=${cur%%=*}= cur=${cur#*=}
    elif [[ $prev == --* ]]; then
        key=$prev
    fi
    key=${key#--}
    case $verb in
@FLAGS@
    esac
    if [[ $COMP_CWORD -eq 2 && -n $below && $cur != -* ]]; then
        COMPREPLY=($(compgen -W "$below" -- "$cur"))
        return
    fi
    case $verb:${key//-/_} in
@CHOICES@
    esac
    if [[ -z $words && -n $settings ]]; then
        case ${key//-/_} in
@VALUES@
        esac
    fi
    if [[ -n $words ]]; then
        COMPREPLY=($(compgen -P "$before" -W "$words" -- "$cur"))
    elif [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$cur"))
        [[ -n $settings ]] && COMPREPLY+=($(compgen -P -- -W "$settings" -- "${cur#--}"))
    elif [[ -z $key && -n $cur && -n $settings ]] && COMPREPLY=($(compgen -S = -W "$settings" -- "$cur")) &&
        [ "${#COMPREPLY[@]}" -gt 0 ]; then
        type compopt &>/dev/null && compopt -o nospace
    else
        COMPREPLY=($(compgen -P "$before" -f -- "$cur"))
        type compopt &>/dev/null && compopt -o filenames
    fi
}
complete -F _megatune megatune
_megatune_settings=@SETTINGS@
