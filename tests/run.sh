#!/usr/bin/env bash
# All tests, on CPU: bash tests/run.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
prepare_environment
keep_freed_memory
cd "$root"
# Many tests compile the same small programs; each is compiled once.
export JAX_COMPILATION_CACHE_DIR="$root/.venv/compiled" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
JAX_PLATFORMS=cpu "$PYTHON" -m pytest "$@"
