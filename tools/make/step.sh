#!/bin/sh
# sh tools/make/step.sh TEXT COMMAND...: runs COMMAND, and says how many seconds that takes; on a
# terminal also while it runs. What COMMAND prints is shown only if it fails.

text=$1
shift
begin=$(date +%s)
log=$(mktemp)
ticker=

seconds() {
    echo $(($(date +%s) - begin))
}

# COMMAND stays in the foreground, where Ctrl-C reaches it; what counts is in the background.
stop_ticker() {
    test -z "$ticker" && return
    kill "$ticker"
    wait "$ticker" 2>/dev/null
    ticker=
}

trap 'stop_ticker; rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if test -t 1; then
    while :; do
        printf '\r%s ... %s s' "$text" "$(seconds)"
        sleep 1
    done &
    ticker=$!
    again='\r'
else
    printf '%s ...' "$text"
    again=
fi
"$@" >"$log" 2>&1
code=$?
stop_ticker
took=$(seconds)
if test -n "$again"; then
    printf '\r%s ... %s s\n' "$text" "$took"
else
    printf ' %s s\n' "$took"
fi
test "$code" -eq 0 || cat "$log" >&2
exit "$code"
