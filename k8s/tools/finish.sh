#!/usr/bin/env bash
# The last step of the Dockerfile's build stages: puts our wheel into /opt/pagewire, with those packages of it only that
# are named, then checks, prunes and compiles all that is there.
#
#   finish.sh PACKAGE...
set -euo pipefail

VENV=/opt/pagewire
PACKAGES=$VENV/lib/python3.11/site-packages
PIP=(/opt/build/bin/python -m pip --python "$VENV/bin/python")

"${PIP[@]}" install --no-index --no-deps /wheel/pagewire-*.whl
"${PIP[@]}" check
# One distribution has all services; an image has one of them, and what the others are made of is not there.
for package in frontend_svc core_svc worker_svc kernels; do
  [[ " $* " == *" $package "* ]] || rm -rf "${PACKAGES:?}/$package"
done
# Only what runs: no tests, no type stubs, no headers. (torch's own testing package is imported by torch, and
# packages named `test` may be code: hence numpy's and the like by their plural.)
find "$PACKAGES" -depth -type d -name tests -not -path '*/torch/*' -exec rm -rf {} +
find "$PACKAGES" -name '*.pyi' -delete
rm -rf "$PACKAGES/torch/include" "$PACKAGES/torch/share" "$VENV/include"
# torch looks for its manager of shared memory when it is imported; the rest there builds and tests.
if [[ -d $PACKAGES/torch/bin ]]; then find "$PACKAGES/torch/bin" -type f -not -name torch_shm_manager -delete; fi
find "$PACKAGES" -name '*.a' -delete
# Whatever was taken out: the heaviest import still works.
if [[ -d $PACKAGES/torch ]]; then "$VENV/bin/python" -B -c 'import torch, transformers, numba'; fi
# Byte code: a read-only root could never keep it, and imports are what a start waits for. By hash and unchecked, so
# that it depends on the source's text alone. transformers' models are left out: thousands of files, a few of which
# one process imports. So are torch's own tests, some of which are in the language of a newer Python.
find "$PACKAGES" -depth -type d -name __pycache__ -exec rm -rf {} +
"$VENV/bin/python" -m compileall -q --invalidation-mode unchecked-hash \
  -x '/transformers/models/[b-z]|/torch/testing/_internal/' "$PACKAGES"
