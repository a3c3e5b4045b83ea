#!/usr/bin/env bash
# All tests, on CPU: bash tests/run.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
prepare_environment
cd "$root"

# The compiler for TPUs, which some tests use without a TPU; without it they are skipped. It lies
# apart from the other packages, because jax looks for a TPU wherever it finds this one.
tpu="$root/.venv/tpu-compiler"
if [ "$(uname -sm)" = "Linux x86_64" ]; then
  wanted="$("$PYTHON" -c 'import importlib.metadata as m
print(next(r.split(";")[0] for r in m.requires("jax") if r.startswith("libtpu")))')"
  if [ "$(cat "$tpu/installed" 2>/dev/null)" != "$wanted" ]; then
    echo "installing $wanted into .venv/tpu-compiler"
    if "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
      --target "$tpu" "$wanted"; then
      echo "$wanted" >"$tpu/installed"
    else
      echo "warning: $wanted cannot be installed; tests that compile for TPUs will be skipped" >&2
    fi
  fi
  export PYTHONPATH="$tpu${PYTHONPATH:+:$PYTHONPATH}"
fi

# Many tests compile the same small programs; each is compiled once.
export JAX_COMPILATION_CACHE_DIR="$root/.venv/compiled" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
# Compiling is most of the time, and one process of it does not fill two cores.
JAX_PLATFORMS=cpu "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
