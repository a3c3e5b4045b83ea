#!/usr/bin/env bash
# Loss and bag mean on the card at hand, in under 8 minutes on an H200: numbers against float64, then
# times of the XLA path at several chunks beside the bare matmul and the Pallas kernels.
# Installs nothing: needs a Python with jax for the card and numpy (PYTHON=..., default python3).
#   bash launch/bench_kernels.sh [options of `python -m tst_jax.bench kernels`, which win]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" -m tst_jax.bench kernels --check --dtype=bfloat16 --n=16384 --v=128256 \
  --d=576,2048 --bag_sizes=4,16 --chunks=1024,512,2048,4096 --rounds=9 --limit_s=300 "$@"
