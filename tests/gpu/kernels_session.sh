. .gpu/setup.sh
export PYTHONPATH=$PYTHONPATH:$PWD/src:$PWD/tests PYTHONUNBUFFERED=1
python3 -c 'import pytest' || exit 3
for area in store expand gumbel moe norm; do
  timeout 160 python3 -m pytest -o addopts= -p no:cacheprovider -q tests/kernels/${area}_cases.py --tb=short > $OUT/$area.txt 2>&1 &
done
wait
for area in store expand gumbel moe norm; do echo "== $area"; grep -E '^(E  |FAILED|ERROR|[0-9]+ (passed|failed))|passed|failed' $OUT/$area.txt | cut -c1-180 | head -12; done
timeout 110 python3 tests/gpu/time_kernels.py 2>&1 | tee $OUT/times.txt
