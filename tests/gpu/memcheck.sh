#!/bin/sh
# compute-sanitizer's memcheck over 30 steps of a tiny model: kernel by kernel with every tensor in
# an allocation of its own, then with CUDA graphs. Ends with an error if any access is wrong.
set -eu
cd "$(dirname "$0")/../.."
check="compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 5"
PYTORCH_NO_CUDA_MEMORY_CACHING=1 $check "${PYTHON:-python3}" tests/gpu/soak.py --memcheck --no-graphs
$check "${PYTHON:-python3}" tests/gpu/soak.py --memcheck
