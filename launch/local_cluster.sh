#!/usr/bin/env bash
# Trains one run with N processes on this machine's CPU, to try what several hosts would do:
#
#     bash launch/local_cluster.sh 2 --config=configs/quickstart.py --workdir=runs/two
#
# --devices=K gives each process K devices (1). --port=P is the coordinator's (a free one).
# --config.NAME=VALUE goes to tst_jax.train; --dry_run prints the commands only.
# The processes take $PYTHON as it is, or else the .venv that is made as for quickstart.sh.
#
# SIGTERM and Ctrl-C are passed on: the run saves. Ends with 0 if all did, 75 if the run was told to
# end and saved, else with the status of the process that failed first. The lines of all processes
# but the first begin with [number].
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

count="${1:-}"
case "$count" in
  -h | --help) parse_arguments "" "" --help ;;
  [1-9] | [1-9][0-9]) shift ;;
  *) fail "the first argument is '$count'; give the number of processes, 1 to 99" ;;
esac
parse_arguments "devices port" "" "$@"
number devices 1 1
number port 1 "$((20000 + RANDOM % 10000))"
check_run
while (exec 6<>"/dev/tcp/127.0.0.1/${option[port]}") 2>/dev/null; do
  option[port]="$((option[port] + 1))" # somebody listens there
done

if [ -z "${PYTHON:-}" ]; then
  [ -n "${option[dry_run]:-}" ] || prepare_environment
  PYTHON="$root/.venv/bin/python"
fi
keep_freed_memory

processes=() # ids of those that run
readers=()   # ids of what puts [number] in front of their lines
# shellcheck disable=SC2317 # called by the traps
tell() { # tell SIGNAL: to all that run
  local process
  for process in "${processes[@]}"; do
    kill "-$1" "$process" 2>/dev/null || true
  done
}
trap 'tell KILL' EXIT # leaves none behind when this script itself fails
trap 'tell TERM' TERM INT HUP

for ((number = 0; number < count; number++)); do
  command=(env JAX_PLATFORMS=cpu "JAX_NUM_CPU_DEVICES=${option[devices]}"
    "JAX_COORDINATOR_ADDRESS=127.0.0.1:${option[port]}" "JAX_NUM_PROCESSES=$count"
    "JAX_PROCESS_ID=$number" "$PYTHON" "${trainer[@]}")
  announce "${command[@]}" || continue
  if [ "$number" = 0 ]; then
    "${command[@]}" &
    processes+=($!)
  else
    exec 5> >(exec sed -u "s/^/[$number] /" >&2)
    readers+=($!)
    "${command[@]}" >&5 2>&5 5>&- &
    processes+=($!)
    exec 5>&-
  fi
done

# Asks instead of waiting for them in turn: the one that fails first tells why the others did.
failed=0 saved=0
while [ "${#processes[@]}" -gt 0 ]; do
  left=()
  for process in "${processes[@]}"; do
    if kill -0 "$process" 2>/dev/null; then
      left+=("$process")
      continue
    fi
    status=0
    wait "$process" || status=$?
    case "$status" in
      0) ;;
      "$SAVED") saved="$SAVED" ;;
      *) [ "$failed" != 0 ] || failed="$status" ;;
    esac
  done
  processes=("${left[@]}")
  sleep 0.2
done
for process in "${readers[@]}"; do
  while kill -0 "$process" 2>/dev/null; do sleep 0.05; done
done
[ "$failed" = 0 ] || exit "$failed"
exit "$saved"
