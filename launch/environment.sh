# Makes a virtual environment and keeps it up to date; sourced by the scripts beside it.
#
#   prepare_environment FOLDER REQUIREMENT PACKAGE...
#
# installs this repository as REQUIREMENT ('.', '.[docs]' or '.[test]', editable) and each PACKAGE
# without its dependencies. FOLDER/stamp records the inputs; a second run with equal inputs does
# nothing.

TORCH=2.13.0

stop() {
    printf '%s\n' "$@" >&2
    exit 1
}

choose_python() {
    local python candidates=("${PYTHON:-python3}")
    [ -n "${PYTHON:-}" ] || candidates+=(python)
    for python in "${candidates[@]}"; do
        if command -v "$python" >/dev/null 2>&1; then
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
                stop "$python is $("$python" --version 2>&1 || true), and Python 3.10 or newer is needed." \
                    "Install one, or name it: PYTHON=/path/to/python3.12 bash $0"
            # In an active virtual environment, choose the Python that made it, because that
            # environment may be the folder that is removed and made again.
            "$python" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    stop "No ${PYTHON:-python3} on this machine. Install Python 3.10 or newer, or name it:" \
        "PYTHON=/path/to/python3.12 bash $0"
}

# A hash of the inputs of an installation with this Python.
environment_stamp() {
    local python=$1 requirement=$2
    shift 2
    "$python" - "$PWD" "$python" "$requirement" "$TORCH" "$@" <<'PYTHON'
import hashlib, pathlib, sys

files = [pathlib.Path(name).read_bytes() for name in ("setup.cfg", "pyproject.toml")]
print(hashlib.sha256(repr((sys.version, sys.argv[1:], files)).encode()).hexdigest())
PYTHON
}

prepare_environment() {
    local folder=$1 requirement=$2 python stamp log
    shift 2
    python=$(choose_python) || exit 1
    stamp=$(environment_stamp "$python" "$requirement" "$@")
    log=$folder/install.log
    if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi

    echo "[1/3] making a virtual environment in $folder" >&2
    rm -rf -- "$folder"
    "$python" -m venv "$folder" >/dev/null 2>&1 ||
        stop "$python cannot make a virtual environment." \
            "On Debian and Ubuntu the module venv is a separate package: apt-get install python3-venv"
    echo '*' >"$folder/.gitignore"

    # No index is named here, so pip uses the index that this machine is configured with. Without an
    # NVIDIA GPU, pip installs the CPU build (version suffix '+cpu', a tenth of the size) if the
    # index has it. Otherwise pip installs the plain version, which on Linux contains CUDA and also
    # runs on the CPU. If the index has neither, setup.cfg's lower bound of torch applies below.
    echo "[2/3] installing torch (the largest part, once)" >&2
    if command -v nvidia-smi >/dev/null 2>&1; then
        install "$folder" "torch==$TORCH" || true
    else
        install "$folder" "torch==$TORCH+cpu" || install "$folder" "torch==$TORCH" || true
    fi

    echo "[3/3] installing parallel_llama and what it needs" >&2
    install "$folder" --editable "$requirement" || installation_failed "$log"
    [ $# -eq 0 ] || install "$folder" --no-deps "$@" || installation_failed "$log"
    echo "$stamp" >"$folder/stamp"
}

install() {
    local folder=$1
    shift
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" \
        >>"$folder/install.log" 2>&1
}

installation_failed() {
    tail -n 15 "$1" >&2
    stop "The installation failed; the last lines of its log $1 are above." \
        "Check the connection to the package index and the disk space, then run this again."
}
