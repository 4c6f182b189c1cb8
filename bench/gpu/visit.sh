#!/bin/sh
# Run the parts of a visit to a machine with a GPU, from a plain folder and with its own torch: sh bench/gpu/visit.sh first|second
# The wheels that it lacks lie in build/gpu-pack (`make gpu-pack`). Rows and the whole log go to $OUT.
set -eu
case ${1:-} in
	first) parts="smoke train tests nccl" ;;
	second) parts="kernels networks compile published update invariance" ;;
	*) echo "usage: sh bench/gpu/visit.sh first|second" >&2; exit 2 ;;
esac
: "${OUT:=build/visit}" "${PYTHON:=python3}"
site=$(mktemp -d)
mkdir -p "$OUT" "$site/fluvial" "$site/fluvial-0.1.0.dist-info"
if ls build/gpu-pack/*.whl >/dev/null 2>&1; then
	"$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" build/gpu-pack/*.whl
fi
for folder in core kernels engines models bench; do ln -s "$PWD/$folder" "$site/fluvial/$folder"; done
ln -s "$PWD/tests/properties" "$site/fluvial/testing"
printf 'Metadata-Version: 2.1\nName: fluvial\nVersion: 0.1.0\n' > "$site/fluvial-0.1.0.dist-info/METADATA"
export PYTHONPATH="$site" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export TORCHINDUCTOR_CACHE_DIR="$site/inductor" TRITON_CACHE_DIR="$site/triton"
"$PYTHON" -P -m fluvial.bench gpu --parts $parts --out "$OUT" ${ARGS:-} >> "$OUT/log" 2>&1 || echo "exit code $?" >> "$OUT/log"
grep -E '^(smoke|train|tests|nccl|kernels|networks|update|published|compile|invariance): ' "$OUT/log" | cut -c1-240
