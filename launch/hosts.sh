#!/usr/bin/env bash
# Runs a command on several hosts over ssh: torchrun on each host, with as many ranks as the number
# after the host's name. ssh must log in without a password, and torchrun must be on the PATH of such
# a login, or in the folder after --bin. The model has the same path on every host. The secret of the
# run is sent through ssh into a file that is removed at the end. Ctrl-C or SIGTERM ends the ranks.
#
#   bash launch/hosts.sh node1:2,node2:1 serve --model /srv/model
#   bash launch/hosts.sh --bin /opt/parallel-llama/bin me@node1:2,node2:1 generate --model /srv/model --prompt a
#   bash launch/hosts.sh --print node1:2,node2:1 serve --model /srv/model   # to run them by hand
set -euo pipefail

fail() {
    echo "launch/hosts.sh: $1" >&2
    exit 2
}

bin='' is_print='' is_stopped='' is_failed='' names=() n_ranks=() inputs=() sessions=()
while [[ ${1:-} == --* ]]; do
    case $1 in
    --print) is_print=yes ;;
    --bin) bin=${2:?--bin needs a folder}/ && shift ;;
    *) fail "unknown option $1; there are --print and --bin FOLDER" ;;
    esac
    shift
done
[ $# -ge 2 ] || fail 'name the hosts with their ranks, and a command: node1:2,node2:1 serve --model PATH'
IFS=, read -ra hosts <<<"$1"
shift
for host in "${hosts[@]}"; do
    [[ $host =~ ^([A-Za-z0-9_][A-Za-z0-9_.@-]*):([1-9][0-9]*)$ ]] ||
        fail "'$host' is not a host and its number of ranks, such as node1:2"
    names+=("${BASH_REMATCH[1]}") n_ranks+=("${BASH_REMATCH[2]}")
done
port=$((20000 + RANDOM % 10000))

quoted() { # prints words as a command line that sh, bash, zsh and fish read alike
    local word
    for word in "$@"; do
        case $word in
        *[!A-Za-z0-9_./:=@,+-]* | '') printf "'" && printf %s "$word" | sed "s/[\\\\']/'\\\\&'/g" && printf "' " ;;
        *) printf '%s ' "$word" ;;
        esac
    done
}

torchrun_on() { # prints the command line of a host: its number, and the words of the command
    quoted "${bin}torchrun" --nnodes ${#names[@]} --node-rank "$1" \
        --nproc-per-node "${n_ranks[$1]}" --master-addr "${names[0]#*@}" --master-port $port \
        --shutdown-timeout 40 -m parallel_llama "${@:2}" --secret-file
}

if [ -n "$is_print" ]; then
    for node in "${!names[@]}"; do
        echo "# on ${names[node]}"
        echo "$(torchrun_on "$node" "$@")FILE"
    done
    exit
fi

close() { # closes the input of a host's session, which ends the ranks of that host
    local input=${inputs[$1]:-}
    [ -z "$input" ] || exec {input}>&-
    inputs[$1]=''
}
close_all() {
    local node
    for node in "${!names[@]}"; do close "$node"; done
}

trap 'is_stopped=yes; close 0' INT TERM
# A session has failed. If it is that of host 0, nothing else ends the ranks of the other hosts.
trap 'is_failed=yes; close_all' USR1

# What a host runs, with the number of its ranks and the seconds from the end of the input to SIGTERM.
# Rank 0 gets SIGTERM at once and lets running requests finish; then the other ranks end by themselves.
# shellcheck disable=SC2016 # the host expands it
on_host='read -r secret
file=$(mktemp) && trap "rm -f -- $file" EXIT
printf %s "$secret" >"$file"
exec 3<&0
threads=$(($(nproc) / $1))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
"${@:3}" "$file" &
torchrun=$!
{ cat <&3; sleep "$2"; kill "$torchrun"; } >/dev/null 2>&1 &
watch=$!
wait "$torchrun" && code=0 || code=$?
kill "$watch"
exit "$code"'

secret=$(od -A n -N 32 -t x1 /dev/urandom | tr -d ' \n')
for node in "${!names[@]}"; do
    arguments=$(quoted "$on_host" hosts.sh "${n_ranks[node]}" $((node > 0 ? 60 : 0)))
    exec {input}> >(
        trap '' INT # Ctrl-C is for this script alone
        close_all
        code=0
        ssh -o BatchMode=yes -- "${names[node]}" \
            "bash -c $arguments $(torchrun_on "$node" "$@")" || code=$?
        [ "$code" = 0 ] || kill -USR1 $$
        exit "$code"
    )
    sessions+=($!)
    echo "$secret" >&"$input"
    inputs[node]=$input
done
# A signal may have come before the last session.
[ -z "$is_stopped" ] || close 0
[ -z "$is_failed" ] || close_all

status=0
for session in "${sessions[@]}"; do
    until wait "$session" && code=0 || code=$?; ! kill -0 "$session" 2>/dev/null; do :; done
    [ "$code" = 0 ] || status=1
done
[ -z "$is_stopped" ] || status=0
exit $status
