#!/usr/bin/env bash
# The published shapes on the card at hand, in under 8 minutes on an H200: best batch and remat, MFU
# of both phases, and the head's share of a step. Writes models.json.
# Installs nothing: needs a Python with jax for the card, flax, optax and numpy (PYTHON=..., default
# python3).
#   bash launch/bench_models.sh [options of `python -m tst_jax.bench models`, which win]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
exec "${PYTHON:-python3}" -m tst_jax.bench models --json=models.json --limit_s=330 "$@"
