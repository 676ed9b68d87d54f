#!/usr/bin/env bash
# Builds the images with buildah, podman or docker, whichever is there, and prints what each adds to its base.
#
#   k8s/tools/images.sh [TARGET...]     default: frontend core worker-cpu; worker-cuda is the fourth (7 GB)
#   k8s/tools/images.sh --sizes         only the table
#
# PREFIX=registry.example.com/team/pagewire- TAG=... BASE_IMAGE=... TORCH_INDEX_URL=... choose names, base and torch's build.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=k8s/tools/engine.sh
source k8s/tools/engine.sh

PREFIX=${PREFIX:-localhost/pagewire-}
TAG=${TAG:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
BASE_IMAGE=${BASE_IMAGE:-docker.io/library/python:3.11-slim-bookworm}
PYTHON=${PYTHON:-python3}

for tool in buildah podman docker ''; do
  if [[ -z $tool ]]; then echo "error: neither buildah nor podman nor docker is there" >&2; exit 1; fi
  if has "$tool"; then break; fi
done
# buildah tells no sizes.
inspector=$tool
if [[ $tool == buildah ]]; then
  has podman || { echo "error: podman is missing (it tells the sizes): apt-get install podman" >&2; exit 1; }
  inspector=podman
fi

size_bytes() { "$inspector" image inspect --format '{{.Size}}' "$1"; }

sizes() {
  local base target image size
  base=$(size_bytes "$BASE_IMAGE")
  printf '%-14s %12s %14s\n' target 'image (MB)' 'beyond base'
  printf '%-14s %12s %14s\n' base "$((base / 1000000))" ''
  for target in frontend core worker-cpu worker-cuda; do
    image=$PREFIX$target:$TAG
    "$inspector" image inspect "$image" >/dev/null 2>&1 || continue
    size=$(size_bytes "$image")
    printf '%-14s %12s %14s\n' "$target" "$((size / 1000000))" "$(((size - base) / 1000000))"
  done
}

build() {
  local target=$1 secret mount
  local options=(--file k8s/Dockerfile --target "$target" --tag "$PREFIX$target:$TAG" --build-arg "BASE_IMAGE=$BASE_IMAGE")
  if [[ -n ${TORCH_INDEX_URL:-} && $target == worker-* ]]; then
    options+=(--build-arg "TORCH_INDEX_URL=$TORCH_INDEX_URL")
  fi
  options+=(--label "org.opencontainers.image.version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)")
  options+=(--label "org.opencontainers.image.revision=$(git describe --always --abbrev=40 --dirty 2>/dev/null || echo unknown)")
  secret=$(mktemp)
  # shellcheck disable=SC2064
  trap "rm -f '$secret'" EXIT
  "$PYTHON" k8s/tools/pip_conf.py >"$secret"
  options+=(--secret "id=pip,src=$secret")
  if [[ $tool == docker ]]; then
    DOCKER_BUILDKIT=1 docker build "${options[@]}" .
    return
  fi
  # The times of all files are those of the last change to how images are made, so that the same sources and locks make
  # the same layers. Docker's builder does it by SOURCE_DATE_EPOCH.
  options+=(--timestamp "$(git log -1 --format=%ct -- k8s/Dockerfile k8s/requirements k8s/tools/install.sh 2>/dev/null || echo 0)")
  options+=(--layers --network host --pull=never)
  while read -r mount; do options+=(--volume "$mount:$mount:ro"); done < <("$PYTHON" k8s/tools/pip_conf.py --mounts)
  "$tool" build --ignorefile .dockerignore "${options[@]}" .
}

if [[ ${1:-} != --sizes ]]; then
  if [[ $tool != docker ]]; then
    podman image exists "$BASE_IMAGE" || podman pull --quiet "$BASE_IMAGE" ||
      { echo "error: no base image; where no registry is in reach, k8s/tools/local_base.sh makes a stand-in" >&2; exit 1; }
  fi
  for target in "${@:-frontend core worker-cpu}"; do
    for one in $target; do build "$one"; done
  done
fi
sizes
