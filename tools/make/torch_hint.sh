#!/bin/sh
# sh tools/make/torch_hint.sh PYTHON: what to know before pip fetches torch with CUDA's libraries,
# which are gigabytes, for a host that has no use for them. Silent where that will not happen.

test "$(uname -s)" = Linux || exit 0
nvidia-smi -L >/dev/null 2>&1 && exit 0
"$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' && exit 0
# Of variables and of pip's files: who says where packages come from has chosen a torch.
"$1" -m pip config list 2>/dev/null | grep -qE '\.((extra-)?index-url|find-links|no-index)=' && exit 0
cat <<END
There is no NVIDIA GPU here, and pip will fetch torch with the libraries for one: some gigabytes.
For torch without them, stop this (Ctrl-C), set PIP_EXTRA_INDEX_URL to PyTorch's index of wheels for
CPUs, which pytorch.org names, and call make again.
END
