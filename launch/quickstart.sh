#!/usr/bin/env bash
# Baseline against Token Superposition Training on this machine, from nothing to a report:
#
#     bash launch/quickstart.sh                 # about five minutes on two cores
#     SEEDS=3 bash launch/quickstart.sh         # three seeds of each: what a claim needs
#
# Everything goes to runs/quickstart (WORKDIR=... for another place). Run it again to resume.
# Further arguments go to tst_jax.compare, for example --config.steps=1000.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
use_cpu_unless_accelerated
cd "$root"
cat <<'TEXT'
Baseline against TST: 1.1M parameters, Python's standard library as text, equal FLOPs. One seed says
little: the difference of two runs is two or three times their noise at this size. The published factors
(up to 2.5 times less compute) are for models a thousand times larger.
TEXT
workdir="${WORKDIR:-runs/quickstart}"
# Each arm compiles once, however many seeds it runs and however often it is resumed.
export JAX_COMPILATION_CACHE_DIR="$PWD/.venv/compiled"
"$PYTHON" -m tst_jax.prepare --source=stdlib --out="$workdir/store"
"$PYTHON" -m tst_jax.compare --config=configs/quickstart.py --workdir="$workdir" \
  --config.data.store="$workdir/store" --seeds="${SEEDS:-1}" "$@"
