#!/usr/bin/env bash
# Builds kube-apiserver, kube-controller-manager and kube-scheduler 1.20.2 from Debian's source package.
#
#   k8s/tools/build_kubernetes.sh [DIR]     default: ${XDG_CACHE_HOME:-~/.cache}/pagewire-kubernetes
#
# Once per machine: about 15 minutes of one core at low priority, 2.3 GB while it builds, 250 MB after. Prints the
# folder of the binaries. Debian is the only place this needs: its package index is that of the machine's own
# configuration, with sources turned on in a copy of it.
set -euo pipefail

VERSION='1.20.5+really1.20.2-1.1+deb12u1'
BINARIES=(kube-apiserver kube-controller-manager kube-scheduler)
DIR=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/pagewire-kubernetes}

is_complete() {
  local name
  for name in "${BINARIES[@]}"; do [[ -x $DIR/bin/$name ]] || return 1; done
}

if is_complete; then
  echo "$DIR/bin"
  exit
fi
for tool in go jq rsync; do
  command -v "$tool" >/dev/null || { echo "error: $tool is missing: apt-get install golang-go jq rsync" >&2; exit 1; }
done

mkdir -p "$DIR/apt/lists/partial" "$DIR/source" "$DIR/bin"
exec 9>"$DIR/.lock"
flock 9
cat /etc/apt/sources.list.d/debian.sources 2>/dev/null | sed 's/^Types:.*/Types: deb-src/' >"$DIR/apt/debian.sources"
sed -n 's/^deb /deb-src /p' /etc/apt/sources.list >"$DIR/apt/debian.list" 2>/dev/null || true
options=(-o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$DIR/apt" -o "Dir::State::lists=$DIR/apt/lists")
cd "$DIR/source"
if [[ ! -e main/Makefile ]]; then
  apt-get "${options[@]}" update -qq >&2
  apt-get "${options[@]}" source --download-only -qq "kubernetes=$VERSION" >&2
  mkdir -p main
  tar -xf kubernetes_*.orig.tar.* -C main --strip-components=1
fi
cd main
mkdir -p .go/src/k8s.io
[[ -e .go/src/k8s.io/kubernetes ]] || ln -s ../../.. .go/src/k8s.io/kubernetes
# One core, and nobody else's turn: this is a tool for a test, not worth disturbing the machine.
export GOPATH="$PWD/.go" CGO_ENABLED=0 GOPROXY=off GOMAXPROCS=1 GOFLAGS='-p=1' GO111MODULE=auto
export KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_COMMIT=debian KUBE_GIT_TREE_STATE=archive KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20
for name in "${BINARIES[@]}"; do
  nice -n 19 make WHAT="cmd/$name" >&2
  cp "_output/local/go/bin/$name" "$DIR/bin/.$name" && mv "$DIR/bin/.$name" "$DIR/bin/$name"
done
cd "$DIR"
is_complete
chmod -R u+w source && rm -rf source apt
echo "$DIR/bin"
