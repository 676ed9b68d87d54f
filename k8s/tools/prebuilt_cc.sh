#!/bin/sh
# The `C compiler` of the CUDA image, which has none. Triton asks for one thing, its driver binding, and that was compiled
# when the image was built; whatever else is asked for is refused.
set -eu
here=$(dirname "$0")
output='' source=''
while [ $# -gt 0 ]; do
  case $1 in
    -o) output=$2; shift ;;
    *.c) source=$1 ;;
  esac
  shift
done
if [ -n "$output" ] && [ -n "$source" ] && echo "$(cat "$here/cuda_utils.sha256")  $source" | sha256sum -c --status; then
  exec cp "$here/cuda_utils.so" "$output"
fi
echo "error: this image has no C compiler, only Triton's driver binding ready made; asked for: ${source:-nothing}" >&2
exit 1
