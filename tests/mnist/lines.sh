#!/usr/bin/env bash
# What mnist.cpp claims: that it differs from mnist_plain.cpp by at most five lines, which its first comment shows.
#
#   lines.sh MNIST_PLAIN.cpp MNIST.cpp
set -euo pipefail

# Without the first comment, which says what the file is.
body() { awk '!begun && /^\/\// { next } { begun = 1; print }' "$1"; }
first_comment() { awk '!/^\/\// { exit } { print }' "$1"; }

# diff's lines, as the comment has them: no indentation.
differences=$(diff --unified=0 <(body "$1") <(body "$2") | sed -n '/^---/d; /^+++/d; s/^\([-+]\) */\1 /p') || true
shown=$(first_comment "$2" | sed -n 's,^//   \([-+] .*\),\1,p')

if [[ -z $differences ]]; then
  echo "FAIL: the files don't differ"
  exit 1
fi
if [[ $shown != "$differences" ]]; then
  printf 'FAIL: the first comment of %s must show what diff prints:\n' "$2"
  sed 's,^,//   ,' <<<"$differences"
  exit 1
fi
# A line that was changed is one - and one +, a new one is a +, one that is gone a -.
added=$(grep -c '^+' <<<"$differences") || true
removed=$(grep -c '^-' <<<"$differences") || true
lines=$((added > removed ? added : removed))
printf '%d lines differ: %d in %s instead of %d in %s\n' "$lines" "$added" "$(basename "$2")" "$removed" "$(basename "$1")"
((lines <= 5))
