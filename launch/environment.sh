# Sourced by the scripts that people run: finds a Python, makes .venv, installs requirements.txt.
# Sets PYTHON to the virtual environment's. Needs no network once everything is installed.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

python_starts() { # a name on PATH may be a stub that does not start
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    python_starts "$PYTHON" && { echo "$PYTHON"; return; }
    echo "error: PYTHON=$PYTHON is no Python 3.11 to 3.13 that starts; point it to one" >&2
    return 1
  fi
  for candidate in python3.13 python3.12 python3.11 python3; do
    python_starts "$candidate" && { echo "$candidate"; return; }
  done
  echo "error: no Python 3.11 to 3.13 found; install one, or set PYTHON to its path" >&2
  return 1
}

prepare_environment() {
  local found wanted
  found="$(find_python)" || exit 2
  if ! python_starts "$root/.venv/bin/python"; then
    "$found" -m venv --clear "$root/.venv" || {
      echo "error: $found cannot make a virtual environment; install its venv package" >&2
      exit 2
    }
  fi
  PYTHON="$root/.venv/bin/python"
  # The stamp is a copy of what was installed last, so that a second run asks no network.
  wanted="$root/.venv/installed-requirements.txt"
  if ! cmp -s "$root/requirements.txt" "$wanted"; then
    echo "installing requirements.txt into .venv"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -r "$root/requirements.txt" || {
      echo "error: installing requirements.txt failed; see the lines above" >&2
      exit 2
    }
    cp "$root/requirements.txt" "$wanted"
  fi
}

# Without an accelerator, an installed TPU library would still look for one.
use_cpu_unless_accelerated() {
  if [ -z "${JAX_PLATFORMS:-}" ] && ! compgen -G "/dev/nvidia[0-9]*" >/dev/null &&
    ! compgen -G "/dev/accel*" >/dev/null && ! compgen -G "/dev/vfio/[0-9]*" >/dev/null; then
    export JAX_PLATFORMS=cpu
  fi
}

# glibc returns each step's large buffers to the system and asks for them again. Keeping them makes
# CPU steps up to a tenth faster, and compiling, whose threads then share one heap, a third slower.
keep_freed_memory() {
  export MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_MMAP_THRESHOLD_=17179869184 MALLOC_ARENA_MAX=1
}
