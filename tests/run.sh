#!/usr/bin/env bash
# All tests, on CPU: bash tests/run.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
prepare_environment
keep_freed_memory
cd "$root"
JAX_PLATFORMS=cpu "$PYTHON" -m pytest "$@"
