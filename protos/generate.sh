#!/usr/bin/env bash
# Generates the Python code of pagewire.v1 beside its protos (or into the folder given). Used by `make protos`.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-protos}
python -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  protos/pagewire/v1/*.proto
