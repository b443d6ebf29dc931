#!/usr/bin/env bash
# Creates .venv with the exact versions of constraints.txt and everything one machine needs to run inferlog.
# Needs nothing but a Python from 3.10 to 3.13 that has the venv module; uv, itself a package, does the installing.
set -euo pipefail
cd "$(dirname "$0")/../.."

usable='import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'
python=""
for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10 /usr/bin/python3; do
  if "$candidate" -c "$usable" >/dev/null 2>&1; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
  echo "No usable Python: inferlog needs 3.10 to 3.13 with venv; install one or name it: make PYTHON=/path/to/python3" >&2
  exit 1
fi

started=$SECONDS
if [ ! -x .venv/bin/uv ]; then
  echo "1/2 creating .venv with $("$python" --version)"
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
fi
echo "2/2 installing packages (torch is large: several GB the first time)"
.venv/bin/uv pip install --python .venv/bin/python -c constraints.txt -e '.[api,gpu,streams,local,demo,dev]'
touch .venv/.ready
echo "ready in $((SECONDS - started)) s"
