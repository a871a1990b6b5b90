#!/bin/sh
# usage: make_venv.sh FOLDER: makes a virtual environment with Python 3.11 or newer, or says what is missing.
# As root on Debian or Ubuntu it installs what is missing. PYTHON=/path/to/python chooses the interpreter.
set -eu
venv=$1

if "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    exit 0 # already there, and it works
fi

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

find_python() { # the first interpreter that is new enough
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
}

apt_install() { # only where it can be done without asking
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    echo "installing with apt-get: $*" >&2
    apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >&2 || return 0
}

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
[ -n "$python" ] || fail "Python 3.11 or newer is needed and was not found. Install it (Debian, Ubuntu: sudo apt-get install \
python3 python3-venv; Ubuntu 22.04: python3.11 python3.11-venv) or name one: make PYTHON=/path/to/python3"

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    apt_install "$package"
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python has no venv module. Install it: sudo apt-get install $package"
fi
echo "making $venv with $("$python" --version)"
"$python" -m venv --clear "$venv"
