#!/usr/bin/env bash
# Collects what a bare GPU machine without a network lacks, as wheels, in .whl/ (a few MB), once. Run in the repository's root.
# There: python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site .whl/*.whl
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
FOR=${FOR:-3.12} # the Python there

exclude=$(git rev-parse --git-path info/exclude)
mkdir -p "$(dirname "$exclude")"
grep -qxF /.whl/ "$exclude" 2>/dev/null || echo /.whl/ >>"$exclude"
rm -rf .whl && mkdir .whl
platforms=()
for glibc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
"$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version "$FOR" --implementation cp "${platforms[@]}" -d .whl \
    megatron-core==0.19.2 msgspec==0.22.0 hjson==3.1.0 pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 \
    typing-inspection==0.4.5
# Sources only, and asked for torch while it is built: the environment here has it. Its kernels are not built; the recipes use none.
DS_BUILD_OPS=0 "$PYTHON" -m pip wheel -q --no-deps --no-build-isolation -w .whl deepspeed==0.19.8
# For its entry points, by which the engine finds the adapters. The code that runs is that of the working tree.
"$PYTHON" -m pip wheel -q --no-deps --no-build-isolation -w .whl .
rm -rf build/lib build/bdist.* # what setuptools leaves
du -sh .whl
