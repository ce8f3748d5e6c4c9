#!/bin/bash
# All that needs a GPU, in one go of less than 400 s on an H200 with FlashInfer's kernels built:
#
#   OUT=folder tests/gpu/session.sh [PART=SECONDS ...]
#
# Without arguments every part with a limit runs; with them, those named. What must be right runs side
# by side first, what is timed runs alone afterwards. A line or a few for each part on stdout; in OUT
# at most eight files: the parts' JSON, the profile, and session.log with the rest.
set -u
cd "$(dirname "$0")/../.." || exit
python=${PYTHON:-python3}
out=${OUT:?the folder for the results}
logs=$(mktemp -d)
export PYTHONPATH=$PWD/src:$PWD/tests:$PWD/tools${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
shape=(--config qwen3-0.6b --device cuda --log-level warning)
tests=("$python" -m pytest -o addopts= -q -s -p no:cacheprovider -W ignore)

declare -A limit=([parity]=300 [kernel_tests]=200 [formats]=200 [fp8_kv]=300 [api]=240 [transformers]=240 [soak]=120 [memcheck]=150 [offline]=60
                  [single]=50 [single_14b]=90 [storm]=70 [startup]=60 [profile]=45 [kernels]=80
                  [attention]=0 [products]=0)
beside=(parity kernel_tests formats fp8_kv api transformers soak memcheck)
alone=(offline single single_14b storm startup profile kernels attention products)
if [ $# -gt 0 ]; then
  declare -A asked=()
  for word in "$@"; do asked[${word%%=*}]=${word#*=}; done
  for part in "${!limit[@]}"; do limit[$part]=${asked[$part]:-0}; done
fi

shared() {  # the tests named, over $1 processes: importing, compiling and capturing is most of it
  local of=$1 codes=0 pids=() pid
  for ((part = 0; part < of; part++)); do
    GPU_PART=$part/$of "${tests[@]}" "${@:2}" & pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || codes=1; done
  return $codes
}
run_parity() {
  export PARITY_OUT=$out/parity.jsonl
  shared 4 tests/gpu/test_cuda_parity.py -k "${PARITY:-test}"
}
run_kernel_tests() { shared 4 tests/gpu/test_gpu_kernels.py; }
run_formats() { shared 2 tests/gpu/test_gpu_formats.py; }
run_fp8_kv() { shared 3 tests/gpu/test_fp8_kv_on_gpu.py; }
run_transformers() { shared 2 tests/gpu/test_transformers_backend_on_gpu.py; }
run_api() { shared 4 tests/gpu/test_gpu_masks.py tests/gpu/test_bad_rows.py tests/gpu/test_gpu_logprobs.py \
  tests/gpu/test_gpu_memory.py; }
run_soak() { "$python" tests/gpu/soak.py --seconds 45 --json "$out/soak.json"; }
run_memcheck() { PYTHON=$python tests/gpu/memcheck.sh; }
run_offline() {
  "$python" tools/bench offline "${shape[@]}" --flops 790e12 --bandwidth 4.3e12 --json "$out/offline.json"
}
single() {  # requests that do not overlap, of the shape $1; results as $2.json
  mkdir -p "$logs/$2"
  "$python" - "$logs/$2" "$1" << 'PY'
import json, pathlib, sys
from bench import shapes
folder = pathlib.Path(sys.argv[1])
shapes.write_folder(folder / "model", shapes.shape(sys.argv[2]))
lines = [{"timestamp": (2.0 if "0.6b" in sys.argv[2] else 5.0) * n, "input_length": 128, "output_length": 512} for n in range(6)]
(folder / "single.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
PY
  "$python" tools/bench online "$logs/$2/model" --load-format dummy --device cuda \
    --trace "$logs/$2/single.jsonl" --json "$out/$2.json"
}
run_single() { single qwen3-0.6b single; }
run_single_14b() { single qwen3-14b single_14b; }
run_storm() {
  "$python" tools/bench storm "${shape[@]}" --max-model-len 16384 --json "$out/storm.json"
}
run_startup() { "$python" tools/bench startup "${shape[@]}" --rounds 2 --json "$out/startup.json"; }
run_profile() {
  "$python" tools/bench offline "${shape[@]}" --requests 64 --output-tokens 60:80 --profile 20 \
    --profile-dir "$logs/profile" && gzip -c "$logs"/profile/*.json > "$out/profile.json.gz"
}
run_attention() {
  for pages in "" --fp8; do
    "$python" tests/gpu/time_decode_attention.py --chosen $pages
    "$python" tests/gpu/time_shared_attention.py --chosen $pages
  done
}
run_products() { "$python" tests/gpu/time_skinny.py --models 0.6B --rows "${ROWS:-192,256,256b}"; }
run_kernels() { "$python" tests/gpu/time_kernels.py sampling; }

one() {  # a part under its limit; what is worth reading of it
  local name=$1 seconds=${limit[$1]} began=$SECONDS
  [ "$seconds" -gt 0 ] || return 0
  # A shell of its own, so that the limit ends all that the part has started.
  { declare -p python out logs shape tests; declare -f single shared "run_$name"; echo "run_$name"; } \
    > "$logs/$name.sh"
  timeout -k 5 "$seconds" bash "$logs/$name.sh" > "$logs/$name.log" 2>&1
  local code=$?
  echo "PART $name: code $code, $((SECONDS - began)) s"
  [ $code -eq 0 ] || tail -n 4 "$logs/$name.log" | cut -c1-300
  grep -aE '^(PARITY|FLIPS|FP8KV|FOREIGN|MEMORY|SOAK|OWN|heads|  \(|[0-9.]+B(/[0-9])? |FAILED|ERROR|E  |=+ .*(ERROR|Invalid|SUMMARY)|error|[0-9]+ (passed|failed))|passed|tokens/s|efficiency|engine idle|host|^  (plan|pack|upload|attention|forward|sample|result)|decode steps|itl|ttft|times the calm|floor|ready|first token' \
    "$logs/$name.log" | cut -c1-200 | tail -"${2:-40}"
}

mkdir -p "$out"
# FlashInfer's kernels at once, instead of one after the other: minutes, where they are needed.
if ((limit[parity] + limit[fp8_kv] + limit[api] > 0)); then
  "$python" tests/gpu/compile_kernels.py 12
fi
for part in "${beside[@]}"; do one "$part" 60 > "$logs/$part.said" & done
wait
for part in "${beside[@]}"; do cat "$logs/$part.said"; done
for part in "${alone[@]}"; do one "$part" 60; done
for log in "$logs"/*.log; do printf '\n######## %s\n' "$log"; cat "$log"; done > "$out/session.log"
