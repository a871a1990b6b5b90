#!/bin/sh
# setup.sh venv FOLDER: make a virtual environment with Python 3.11 or newer (PYTHON=/path/to/python chooses one)
# setup.sh tools FOLDER: what tests need besides Python packages: a C compiler for one of those, bubblewrap and Chromium
#   if they can be had
# setup.sh vllm FOLDER: what vLLM needs besides Python packages; called by vllm.sh
# As root on Debian or Ubuntu what is missing is installed; elsewhere one line says what to install.
set -eu
venv=$2

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

apt_install() { # only where it can be done without asking
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    echo "installing with apt-get: $*" >&2
    apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >&2 || return 0
}

find_python() { # the first interpreter that is new enough
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
}

make_venv() {
    if "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        return # already there, and it works
    fi
    python=$(find_python)
    [ -n "$python" ] || [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not Python 3.11 or newer, or does not run"
    if [ -z "$python" ]; then
        apt_install python3 python3-venv
        python=$(find_python)
    fi
    if [ -z "$python" ]; then # a release whose python3 is older, such as Ubuntu 22.04
        apt_install python3.11 python3.11-venv
        python=$(find_python)
    fi
    [ -n "$python" ] || fail "Python 3.11 or newer is needed and was not found. Install it (Debian, Ubuntu: sudo apt-get \
install python3 python3-venv; Ubuntu 22.04: python3.11 python3.11-venv) or name one: make PYTHON=/path/to/python3"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        apt_install "$package"
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "$python has no venv module. Install it: sudo apt-get install $package"
    fi
    echo "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

compiles() {
    command -v cc >/dev/null && "$venv/bin/python" -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

has_chromium() {
    command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null
}

find_tools() {
    headers=$("$venv/bin/python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')
    compiles || apt_install gcc libc6-dev "$headers"
    compiles || fail "a C compiler and Python's headers are needed for a package that only tests use. Install them: \
sudo apt-get install gcc libc6-dev $headers"
    command -v bwrap >/dev/null || apt_install bubblewrap
    has_chromium || apt_install chromium
    has_chromium ||
        echo "the tests of report.html in a browser will be skipped; for them: sudo apt-get install chromium" >&2
}

loads_numa() {
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null
}

find_vllm_tools() { # a library that its kernels link to, and what it compiles its sampler with at the first request
    loads_numa || apt_install libnuma1
    loads_numa || fail "vLLM needs libnuma. Install it: sudo apt-get install libnuma1"
    headers=$("$venv/bin/python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')
    compiles && command -v g++ >/dev/null || apt_install gcc g++ libc6-dev "$headers"
    compiles && command -v g++ >/dev/null || fail "vLLM needs a C++ compiler and Python's headers: it compiles its \
sampler at the first request. Install them: sudo apt-get install gcc g++ libc6-dev $headers"
}

case $1 in
venv) make_venv ;;
tools) find_tools ;;
vllm) find_vllm_tools ;;
esac
