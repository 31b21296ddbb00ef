#!/bin/sh
# The suites of the methods and of the lock on every backend, with the lowest version of each library that pyproject.toml
# allows. The argument is a Python of the oldest version that is supported, whose pip fills the environment.
set -eu
cd "$(dirname "$0")/.."
python=$1
environment=.state/lowest
lowest=$environment/lowest.txt

[ -x "$environment/bin/python" ] || "$python" -m venv --without-pip "$environment"
"$python" - >"$lowest" <<'PYTHON'
import re, tomllib

extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
for needed in sorted({each for extra in extras.values() for each in extra if not each.startswith("multilock")}):
    name, version = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)", needed).groups()
    print(f"{name}=={version}")
PYTHON
"$python" -m pip --python "$environment/bin/python" install --quiet -e '.[all]' -c "$lowest" \
    hypothesis pytest pytest-asyncio pytest-randomly pytest-timeout pytest-xdist
echo "== $(tr '\n' ' ' <"$lowest")"
"$environment/bin/python" -m pytest -q -n "${WORKERS:-3}" -k "TestBackend or TestLock" tests/conformance
