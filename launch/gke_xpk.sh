#!/usr/bin/env bash
# Trains one run on TPU slices of a GKE cluster that XPK made, and shows the first process' log:
#
#     bash launch/gke_xpk.sh --cluster=CLUSTER --workload=tst-3b --type=v5p-128 --slices=2 \
#       --config=configs/dense_3b.py --workdir=gs://BUCKET/runs/3b --store=gs://BUCKET/store
#
# Needs xpk with what it needs itself (gcloud, kubectl, docker), and a cluster that `xpk cluster
# create` made, whose nodes may write the bucket. Further arguments:
#
#     --project=ID --zone=ZONE  other than gcloud's own
#     --slices=N         how many slices of that type (1)
#     --image=IMAGE      to put the code into; Python 3.11 to 3.13, Debian's or alike (python:3.12)
#     --store=gs://...   token store that each machine copies; else --config.data.store is one
#     --retries=N        how often the workload is started again when told to end, or stopped (10)
#     --follow           shows the log of a workload that is there
#     --stop             tells the workload to end, and deletes it; the run can be resumed
#     --config.NAME=...  for tst_jax.train
#     --dry_run          prints the commands of an undisturbed run only
#
# The workload does not depend on this script: after Ctrl-C it goes on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

parse_arguments "cluster workload type slices image project zone store retries" "follow stop" "$@"
given cluster "the name of the cluster"
given workload "a name for the workload"
matches workload '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' "small letters, digits and dashes"
number slices 1 1
number retries 0 10
if [ -z "${option[follow]:-}${option[stop]:-}" ]; then
  given type "the TPU type of a slice, for example --type=v5p-128"
  check_run
  check_copied
  matches workdir 'gs://.*' "gs://BUCKET/FOLDER, which outlives the machines"
elif [ -n "${option[follow]:-}" ] && [ -n "${option[stop]:-}" ]; then
  fail "--follow and --stop exclude each other"
fi

name="${option[workload]}"
pause="${LAUNCH_PAUSE:-60}" # seconds between looks at whether the workload has ended
where=("--cluster=${option[cluster]}")
[ -z "${option[project]:-}" ] || where+=("--project=${option[project]}")
[ -z "${option[zone]:-}" ] || where+=("--zone=${option[zone]}")

if [ -n "${option[stop]:-}" ]; then
  run xpk workload delete "--workload=$name" "${where[@]}" --force
  exit 0
fi

if [ -z "${option[follow]:-}" ]; then
  folder="runs/launch/$name" # xpk copies a whole folder, and this one has more than the code
  run rm -rf "$folder"
  run mkdir -p "$folder"
  run cp -R "${copied[@]}" "$folder/"
  command="$(quoted python -m pip install --quiet -r requirements.txt 'jax[tpu]' gcsfs)"
  if [ -n "${option[store]:-}" ]; then
    code="import sys, gcsfs; gcsfs.GCSFileSystem().get(sys.argv[1], sys.argv[2], recursive=True)"
    command+=" && $(quoted python -c "$code" "${option[store]}/" /tmp/store/)"
    use_store /tmp/store
  fi
  # exec: xpk sends SIGTERM on to the process that it started, which then is the trainer itself.
  command+=" && exec $(quoted python "${trainer[@]}")"
  # Of the statuses below 127, xpk starts only those again that it is told: 75, saved. Saving takes
  # longer than the usual 30 seconds before a container is killed.
  run xpk workload create "--workload=$name" "${where[@]}" "--tpu-type=${option[type]}" \
    "--num-slices=${option[slices]}" "--base-docker-image=${option[image]:-python:3.12}" \
    "--script-dir=$folder" "--max-restarts=${option[retries]}" \
    "--restart-on-exit-codes=$SAVED" --termination-grace-period-seconds=300 "--command=$command"
fi

# A log ends where its container does; before the first and after each there is none for a while.
# So: show what there is, ask for a minute whether all has ended, and again.
labels="jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0"
labels+=",batch.kubernetes.io/job-completion-index=0"
lines=(--tail=-1)
for ((failures = 0; ; )); do
  run kubectl logs --follow "${lines[@]}" "--selector=$labels" || true
  status=0
  run xpk workload list "--wait-for-job-completion=$name" "--timeout=$pause" "${where[@]}" ||
    status=$?
  case "$status" in # as xpk's documentation has them
    0) exit 0 ;;
    124) failures=0 ;;
    125) stop "the workload $name failed; its log is above" ;;
    *)
      failures="$((failures + 1))"
      [ "$failures" -lt 5 ] || stop "xpk does not find out how the workload does; it is left alone"
      sleep "$pause"
      ;;
  esac
  lines=("--since=$((2 * pause))s" --tail=-1) # what came since, and little of it twice
done
