#!/usr/bin/env bash
# What the Dockerfile's build stages put into /opt/pagewire, the virtual environment that the images get.
#
#   install.sh locked FILE          what a lock file names, by hash, with nothing besides
#   install.sh torch cpu|cuda URL   torch for processors or for CUDA; URL: the index of that build, or empty
set -euo pipefail

VENV=/opt/pagewire
PACKAGES=$VENV/lib/python3.11/site-packages
# pip belongs to the build: the environment has none.
PIP=(/opt/build/bin/python -m pip --python "$VENV/bin/python")

locked() {
  "${PIP[@]}" install --require-hashes --no-deps --only-binary :all: -r "$1"
}

torch() {
  local kind=$1 index=$2
  if [[ $kind == cuda && -z $index ]]; then
    # torch, its CUDA libraries and Triton: the lines that the lock for CUDA has on top of the one for processors.
    locked requirements/worker-cuda.txt
  elif [[ $kind == cuda ]]; then
    # Another CUDA: torch names its libraries by exact version. The rest is replaced by the lock's in the next step.
    "${PIP[@]}" install --only-binary :all: --index-url "$index" -r requirements/torch.txt
  else
    "${PIP[@]}" install --no-deps --only-binary :all: ${index:+--index-url "$index"} -r requirements/torch.txt
    if compgen -G "$PACKAGES/torch/lib/libtorch_cuda*" >/dev/null; then
      echo "error: the index has torch's CUDA build; give the address of the CPU index as TORCH_INDEX_URL" >&2
      exit 1
    fi
  fi
  if [[ $kind == cuda ]]; then driver_module; fi
}

# Triton compiles one C file, its binding to the CUDA driver, on the machine it runs on. Done here instead, against a
# driver library that has a name only; `cc` in the image hands it over.
driver_module() {
  local source=$PACKAGES/triton/backends/nvidia include libcuda=/build/libcuda
  include=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths(scheme="posix_prefix")["include"])')
  apt-get update
  apt-get install -y --no-install-recommends gcc libc6-dev
  [[ -e $include/Python.h ]] || apt-get install -y --no-install-recommends libpython3.11-dev
  mkdir -p "$libcuda" "$VENV/libexec"
  gcc -shared -o "$libcuda/libcuda.so.1" -Wl,-soname,libcuda.so.1 -x c /dev/null
  gcc "$source/driver.c" -O3 -shared -fPIC -Wno-psabi -o "$VENV/libexec/cuda_utils.so" \
    -L"$libcuda" -Wl,--no-as-needed -l:libcuda.so.1 -I"$source" -I"$source/include" -I"$include"
  (cd "$source" && sha256sum driver.c | cut -d' ' -f1) >"$VENV/libexec/cuda_utils.sha256"
  install -m 0755 tools/prebuilt_cc.sh "$VENV/libexec/cc"
}

"$@"
