#!/usr/bin/env bash
# What tpu_pod.sh runs on each machine of a slice; not meant to be called by hand. All of it lies in
# the folder tst_jax of the user's home there.
#
#     bash tpu_worker.sh install NAME.tar.gz [PACKAGE...]   the code, and a Python with its packages
#     bash tpu_worker.sh store gs://...                     copies a token store
#     bash tpu_worker.sh start ARGUMENT...                  starts Python with these, if none runs
#     bash tpu_worker.sh follow LINES                       its log, from there until it ends
#     bash tpu_worker.sh status                             its exit status, once it has ended
set -euo pipefail
here="$HOME/tst_jax"
mkdir -p "$here"

running() { # after a restart of the machine, the number may be another process'
  [ -f "$here/pid" ] && grep -qs tst_jax.train "/proc/$(cat "$here/pid")/cmdline"
}

step="$1"
shift
case "$step" in
  install | store)
    if running; then
      echo "the run goes on; its code and data are left as they are"
      exit 0
    fi
    ;;
esac
case "$step" in
  install)
    rm -rf "$here/source"
    mkdir "$here/source"
    tar -xzf "$HOME/$1" -C "$here/source"
    shift
    # The images' own Python is 3.10, and too old.
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --allow-existing --python=3.12 "$here/venv"
    python3 -m uv pip install --quiet --python="$here/venv/bin/python" \
      -r "$here/source/requirements.txt" "$@"
    ;;
  store)
    gcloud storage rsync --recursive "$1" "$here/store"
    ;;
  start)
    if running; then
      echo "the run goes on; followed again"
      exit 0
    fi
    cd "$here/source"
    rm -f "$here/status"
    [ ! -f "$here/log" ] || mv "$here/log" "$here/log.$(date +%s)"
    # In a session of its own, so that the end of this connection is none of its own.
    # shellcheck disable=SC2016 # expanded by that shell
    setsid nohup bash -c '"${@:2}"; echo $? >"$1.part"; mv "$1.part" "$1"' bash "$here/status" \
      "$here/venv/bin/python" "$@" >"$here/log" 2>&1 </dev/null &
    echo $! >"$here/pid"
    ;;
  follow)
    if running; then
      tail -n "$1" --pid="$(cat "$here/pid")" -f "$here/log"
    else
      tail -n "$1" "$here/log"
    fi
    ;;
  status)
    while running; do sleep 1; done
    # None: the machine itself was stopped.
    echo "exit status: $(cat "$here/status" 2>/dev/null || echo none)"
    ;;
  *)
    echo "error: unknown step '$step'" >&2
    exit 2
    ;;
esac
