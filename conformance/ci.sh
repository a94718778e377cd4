#!/usr/bin/env bash
# The steps of the action `conformance` (action.yml): `build` writes a bundle, `run` runs the suite from it. The inputs of
# the action are in variables, so that no input is read as a command.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
built="${RUNNER_TEMP:-/tmp}/truebridge"

case "$1" in
build)
    cd "$here/.."
    cargo xtask bundle "$built"
    ;;
run)
    # Names an option where its variable has a value.
    options=(--device "${DEVICE:-auto}" --report "${REPORT:-conformance-report}" --command "cargo xtask conformance")
    [ -z "${ADAPTERS:-}" ] || options+=(--adapters "$ADAPTERS")
    [ -z "${PAIRS:-}" ] || options+=(--pairs "$PAIRS")
    [ -z "${CASES:-}" ] || options+=(--cases "$CASES")
    [ -z "${SEED:-}" ] || options+=(--seed "$SEED")
    [ -z "${BASELINE:-}" ] || options+=(--baseline "$BASELINE")
    errors="$(mktemp)"
    code=0
    suite=("${PYTHON:-python3}" "${BUNDLE:-$built}/conformance.py" "${options[@]}")
    { "${suite[@]}" 2>&1 >&3 | tee "$errors" >&2; } 3>&1 || code=$?
    # The suite itself tells GitHub of failures. A run that could not begin, or was killed, has told nothing.
    if [ "$code" -gt 1 ] && [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
        reason="the suite ended with $code: $(tail -n 1 "$errors")"
        printf '::error title=conformance::%s\n' "${reason//%/%25}"
        printf '**The suite did not run to its end.**\n\n```text\n%s\n```\n' "$reason" >>"$GITHUB_STEP_SUMMARY"
    fi
    exit "$code"
    ;;
*)
    echo "say build or run" >&2
    exit 2
    ;;
esac
