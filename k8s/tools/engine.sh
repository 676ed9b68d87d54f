# shellcheck shell=bash
# Sourced by the scripts beside it: which container tools there are, and a configuration that works for them here.

has() { command -v "$1" >/dev/null; }

# CAP_SYS_RESOURCE is bit 24. Root without it can't raise limits, which the default configuration asks for.
if [[ -z ${CONTAINERS_CONF:-} && $(id -u) == 0 ]] && ! ((0x$(sed -n 's/^CapEff:\t//p' /proc/self/status) >> 24 & 1)); then
  CONTAINERS_CONF=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/containers.conf
  export CONTAINERS_CONF
fi
