#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Gets what is missing, by name, and nothing else.
#   scripts/setup.sh build   system packages that the library and the command need
#   scripts/setup.sh dev     those, what the tests need, and .venv with requirements/python.txt
#   scripts/setup.sh fuzz    those of build, and clang, which has the fuzzing library
# QUANTFUSE_SETUP=skip leaves the system packages alone (for machines that have their own way of installing).
set -euo pipefail
cd "$(dirname "$0")/.."
readonly level="${1:-build}"

# Names of the packages of the given kinds (see requirements/system.txt) that are not installed.
missing_packages() {
  local kind package _
  while read -r kind package _; do
    [[ " $* " == *" $kind "* ]] || continue
    dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed && continue
    # A baseline that this system's package lists do not have is not asked for again and again.
    if [[ $kind == baseline ]] && compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null; then
      apt-cache show "$package" &>/dev/null || continue
    fi
    echo "$package"
  done < <(grep -v '^#' requirements/system.txt)
}

# The command that may install packages, or nothing where this user may not.
apt_command() {
  if [[ $(id -u) == 0 ]]; then
    echo "apt-get"
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    echo "sudo -n apt-get"
  fi
}

install_system_packages() {
  if ! command -v dpkg-query >/dev/null; then
    echo "setup: not a Debian or Ubuntu system; please install the equivalents of requirements/system.txt" >&2
    return
  fi
  local needed wished apt
  needed=$(missing_packages "$@" | xargs)
  wished=$(missing_packages baseline | xargs)
  [[ -n "$needed$wished" ]] || return 0

  apt=$(apt_command)
  if [[ -z "$apt" ]]; then
    if [[ -n "$needed" ]]; then
      echo "setup: packages are missing and this user may not install them. Run:" >&2
      echo "  sudo apt-get install -y --no-install-recommends $needed${wished:+ $wished}" >&2
      exit 1
    fi
    echo "setup: without these, bench has fewer baselines: sudo apt-get install $wished" >&2
    return
  fi
  export DEBIAN_FRONTEND=noninteractive
  echo "setup: installing $needed $wished"
  $apt update -qq
  # shellcheck disable=SC2086  # lists of names
  [[ -z "$needed" ]] || $apt install -y -qq --no-install-recommends $needed >/dev/null
  local package
  for package in $wished; do
    $apt install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 ||
      echo "setup: $package is not to be had here; bench goes without that baseline" >&2
  done
}

make_venv() {
  local stamp=.venv/.requirements.sha256 wanted
  wanted=$(sha256sum requirements/python.txt)
  [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]] && return
  echo "setup: making .venv"
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/python.txt
  echo "$wanted" >"$stamp"
}

case "$level" in
  build) kinds=(build) ;;
  dev) kinds=(build dev) ;;
  fuzz) kinds=(build fuzz) ;;
  *) echo "usage: scripts/setup.sh [build|dev|fuzz]" >&2; exit 2 ;;
esac
[[ "${QUANTFUSE_SETUP:-}" == skip ]] || install_system_packages "${kinds[@]}"
[[ $level != dev ]] || make_venv
