#!/usr/bin/env bash
# Makes a stand-in for the base image where no registry is in reach: Debian's own Python from Debian's packages, under
# the name that the Dockerfile builds on. Its Python is Debian's build and not python.org's, so an image that is published
# should stand on the official one.
#
#   k8s/tools/local_base.sh [NAME]     default: docker.io/library/python:3.11-slim-bookworm
#
# Does nothing where an image of that name is there already. Needs root, podman and debootstrap; takes about a minute.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=k8s/tools/engine.sh
source ./engine.sh

NAME=${1:-docker.io/library/python:3.11-slim-bookworm}
if podman image exists "$NAME"; then
  echo "$NAME is there"
  exit
fi
has debootstrap || { echo "error: debootstrap is missing: apt-get install debootstrap" >&2; exit 1; }

rootfs=$(mktemp -d)
trap 'rm -rf "$rootfs"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$rootfs" >"$rootfs.log" 2>&1 ||
  { tail -20 "$rootfs.log" >&2; exit 1; }
rm -f "$rootfs.log"
# As the official slim images are: no package lists, no documents, no compiled copies of the standard library's tests.
rm -rf "$rootfs"/var/cache/apt/archives/*.deb "$rootfs"/var/lib/apt/lists/* "$rootfs"/var/log/* \
  "$rootfs"/usr/share/{doc,man,locale,info}/*
# A build must be able to resolve names whatever this machine's resolver is called; the engine mounts its own file.
: >"$rootfs/etc/resolv.conf"
tar -C "$rootfs" -c . | podman import --quiet \
  --change 'CMD ["python3"]' --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
  --change 'ENV LANG=C.UTF-8' --message 'local stand-in for the official image' - "$NAME"
