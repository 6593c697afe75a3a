# SPDX-License-Identifier: Apache-2.0
#
# What the tests of the command share; sourced with the command and the folder of fixtures as arguments.
quantfuse=$1
fixtures=$2
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT

fail() {
  echo "$*"
  exit 1
}
# expect CODE ARGUMENT...: the exit code; the output is left in $work/out and $work/err
expect() {
  code=$1
  shift
  got=0
  "$quantfuse" "$@" >"$work/out" 2>"$work/err" || got=$?
  [ "$got" = "$code" ] || fail "$*: exit code $got, expected $code: $(cat "$work/out" "$work/err")"
}
says() { grep -q -e "$1" "$work/out" "$work/err" || fail "no '$1' in: $(cat "$work/out" "$work/err")"; }
