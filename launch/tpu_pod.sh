#!/usr/bin/env bash
# Trains one run on a Cloud TPU slice: makes the slice, copies the code, installs, trains on all of
# its machines, shows the log of the first, and deletes the slice at the end.
#
#     bash launch/tpu_pod.sh --name=tst --zone=us-east5-a --type=v6e-64 --spot \
#       --config=configs/dense_3b.py --workdir=gs://BUCKET/runs/3b --store=gs://BUCKET/store
#
# Needs gcloud, logged in, with the TPU API on and quota; the slice's service account must be able
# to write the bucket. Further arguments:
#
#     --project=ID       other than gcloud's own
#     --runtime=VERSION  of the slice's machines; by default the one for v5litepod, v5p or v6e
#     --store=gs://...   token store that each machine copies; else --config.data.store is one
#     --spot             a cheaper slice, which may be taken away; another is made then
#     --retries=N        how often a run that was told to end, or lost its slice, goes on (10)
#     --keep             leaves the slice there at the end
#     --config.NAME=...  for tst_jax.train
#     --dry_run          prints the commands of an undisturbed run only
#
# The training does not depend on this script: after Ctrl-C or a lost connection it goes on, and the
# same command follows it again. When the run ends or fails the slice is deleted, also one that was
# there before, so that nothing more is paid for.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

parse_arguments "name zone type project runtime store retries" "spot keep" "$@"
given name "a name for the slice"
matches name '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' "small letters, digits and dashes"
given zone "the slice's zone, for example --zone=us-east5-a"
given type "the slice's accelerator type, for example --type=v6e-64"
number retries 0 10
check_run
check_copied
case "${option[type]}" in # from Cloud TPU's list of software versions
  v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
  v5p-*) runtime=v2-alpha-tpuv5 ;;
  v6e-*) runtime=v2-alpha-tpuv6e ;;
  *) runtime= ;;
esac
runtime="${option[runtime]:-$runtime}"
[ -n "$runtime" ] ||
  fail "--type is ${option[type]}; give v5litepod-N, v5p-N or v6e-N, or its --runtime too"
if [[ "${option[workdir]}" != gs://* && -z "${option[keep]:-}" ]]; then
  fail "--workdir is ${option[workdir]}, which is deleted with the slice; give gs://..., or --keep"
fi
packages=('jax[tpu]')
[[ "${option[workdir]}" != gs://* ]] || packages+=(gcsfs)
[ -z "${option[store]:-}" ] || use_store ../store

name="${option[name]}"
where=("--zone=${option[zone]}")
[ -z "${option[project]:-}" ] || where+=("--project=${option[project]}")
archive="runs/launch/$name.tar.gz"
pause="${LAUNCH_PAUSE:-15}" # seconds before something is tried again

tpu() { # tpu VERB ARGUMENT...
  run gcloud compute tpus tpu-vm "$1" "$name${2:-}" "${@:3}" "${where[@]}" --quiet
}

on() { # on WORKER STEP ARGUMENT...: a step of tpu_worker.sh there
  tpu ssh "" "--worker=$1" "--command=$(quoted bash tpu_worker.sh "${@:2}")"
}

delete() {
  tpu delete
}

slice= # set while there is one for this script to delete
finish() {
  local status=$?
  trap - EXIT INT TERM HUP
  if [ -n "$slice" ] && [ -z "${option[keep]:-}" ]; then
    if ! delete; then
      echo "error: the slice $name may still be there, and cost; delete it by hand" >&2
      status=1
    fi
  fi
  exit "$status"
}
leave() {
  slice=
  echo "the slice $name is left alone, trains and costs; the same command follows it again" >&2
  exit 130
}
trap finish EXIT
trap leave INT TERM HUP

look() { # sets `state`: READY, PREEMPTED..., none (no slice), or unknown, with what gcloud said
  state=none found=
  [ -z "${option[dry_run]:-}" ] || { tpu describe "" '--format=value(state)' && return; }
  found="$(tpu describe "" '--format=value(state)' 2>&1)" && state="${found##*$'\n'}" && return
  [[ "$found" == *NOT_FOUND* ]] || state=unknown
}

create() {
  slice=1
  tpu create "" "--accelerator-type=${option[type]}" "--version=$runtime" ${option[spot]:+--spot}
}

copy() { # a new machine takes a while to answer
  local try
  for try in 1 2 3 4 5; do
    [ "$try" = 1 ] || sleep "$pause"
    run gcloud compute tpus tpu-vm scp launch/tpu_worker.sh "$archive" "$name:" --worker=all \
      "${where[@]}" --quiet && return
  done
  return 1
}

ready= # set once the slice has all that a run needs
prepare() {
  [ -z "$ready" ] || return 0
  look
  case "$state" in
    none) create || return ;;
    READY) slice=1 ;;
    PREEMPTED | TERMINATED | STOPPED) { slice=1 && delete && create; } || return ;;
    unknown) stop "$found" ;;
    *) stop "the slice $name is $state; wait until it is READY, or delete it" ;;
  esac
  copy && on all install "$name.tar.gz" "${packages[@]}" || return
  [ -z "${option[store]:-}" ] || on all store "${option[store]}" || return
  ready=1
}

# Shows the log until the run ends, through lost connections. Sets `outcome`: finished, again (it
# was told to end and saved, or machines were stopped), lost (there is no slice any more), failed.
watch() {
  local lines=+1 failures=0 since statuses
  while true; do
    since="$SECONDS"
    if on 0 follow "$lines" && statuses="$(on all status)"; then
      break
    fi
    look
    case "$state" in
      READY | unknown) ;;
      *) outcome=lost && return ;;
    esac
    [ "$((SECONDS - since))" -lt 600 ] || failures=0
    failures="$((failures + 1))"
    if [ "$failures" -gt "${option[retries]}" ]; then
      slice= # what it does there, nobody knows
      stop "the slice $name does not answer; it is left alone, and costs"
    fi
    sleep "$pause"
    lines=20
  done
  statuses="$(grep -o 'exit status: [a-z0-9]*' <<<"$statuses" | sort -u)" || true
  case "$statuses" in
    "exit status: 0") outcome=finished ;;
    *none*) outcome=again ;;
    "exit status: $SAVED" | "exit status: 0"$'\n'"exit status: $SAVED") outcome=again ;;
    *) outcome="failed, ${statuses//$'\n'/, }" ;;
  esac
  [ -z "${option[dry_run]:-}" ] || outcome=finished
}

run mkdir -p runs/launch
run tar --create --gzip "--file=$archive" --exclude=__pycache__ "${copied[@]}"
for ((attempt = 0; ; attempt++)); do
  if prepare && on all start "${trainer[@]}"; then
    watch
  elif [ "$attempt" = 0 ]; then
    look
    [ "$state" = PREEMPTED ] || stop "the slice could not be made ready; see the lines above"
    outcome=lost
  else
    outcome=lost # there may be room for another one later
    sleep "$((20 * pause))"
  fi
  case "$outcome" in
    finished) exit 0 ;;
    again) ;;
    lost) ready= ;;
    *) stop "the run $outcome" ;;
  esac
  [ "$attempt" -lt "${option[retries]}" ] ||
    stop "started ${option[retries]} times again; no more. The same command goes on"
  echo "starting the run again, from its last checkpoint" >&2
done
