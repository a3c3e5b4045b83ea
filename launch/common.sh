# Sourced by the scripts that start a run on several machines or processes: their arguments, and
# commands that are either run or, with --dry_run, printed.
# shellcheck disable=SC2034 # the scripts read what is set here

if [ "$((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1]))" -lt 404 ]; then
  echo "error: bash $BASH_VERSION is too old; these scripts need 4.4 or later" >&2
  exit 2
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SAVED=75             # the end of a run that was told to end, and saved: start it again
declare -A option=() # of the script's own arguments, by name
passed=()            # --config.NAME=VALUE arguments, for tst_jax.train
exec 3>&1 4>&2       # where run() writes, whoever reads what the command itself prints

fail() { # fail MESSAGE: the arguments cannot be used; nothing has been run yet
  echo "error: $*" >&2
  exit 2
}

stop() { # stop MESSAGE: something that was run went wrong
  echo "error: $*" >&2
  exit 1
}

# parse_arguments "NAMES" "FLAGS" ARGUMENT...: the script takes --NAME=VALUE and --FLAG, beside
# --config, --config.NAME, --workdir, --allow_changes and --dry_run. Works in the repository's root
# from here on.
parse_arguments() {
  local names=" config workdir allow_changes $1 " flags=" dry_run $2 " argument name known
  read -ra known <<<"$names $flags config.NAME"
  shift 2
  for argument in "$@"; do
    [[ "$argument" != *$'\n'* ]] || fail "an argument has several lines; each is one"
    name="${argument%%=*}"
    name="${name#--}"
    case "$argument" in
      -h | --help) # the comment that the script begins with
        sed -n '2,$ { /^#/!q; /^#SBATCH/d; s/^# \{0,1\}//p; }' "$0"
        exit 0
        ;;
      --config.?*=*) passed+=("$argument") && continue ;;
      --?*) ;;
      *) fail "unexpected argument '$argument'; options are written --name=value, with dashes" ;;
    esac
    if [[ "$names" == *" $name "* ]]; then
      [[ "$argument" == *=?* ]] || fail "--$name has no value; write --$name=VALUE"
      option[$name]="${argument#*=}"
    elif [[ "$flags" == *" $name "* ]]; then
      [ "$argument" = "--$name" ] || fail "--$name takes no value"
      option[$name]=1
    else
      fail "unknown option --$name; there are$(printf ' --%s' "${known[@]}")"
    fi
  done
  cd "$root" || exit
}

given() { # given NAME "what to give": fails without --NAME
  [ -n "${option[$1]:-}" ] || fail "--$1 is missing; give $2"
}

matches() { # matches NAME PATTERN "what to give"
  [[ "${option[$1]}" =~ ^($2)$ ]] || fail "--$1 is ${option[$1]}; give $3"
}

number() { # number NAME LEAST DEFAULT
  option[$1]="${option[$1]:-$3}"
  matches "$1" '0|[1-9][0-9]{0,5}' "a number of at least $2"
  [ "${option[$1]}" -ge "$2" ] || fail "--$1 is ${option[$1]}; give a number of at least $2"
}

# Checks --config and --workdir; `trainer` is then what every process runs, after Python.
check_run() {
  given config "a config file, for example --config=configs/dense_3b.py"
  given workdir "the folder of the run: one that all processes see, or gs://..."
  local file="${option[config]%%:*}" # FILE.py:baseline is an arm of FILE.py
  [ -f "$file" ] || fail "--config: there is no file $file in $root"
  if [[ "${option[workdir]}" == *://* ]]; then
    matches workdir 'gs://[^/]+/.+' "a folder, or gs://BUCKET/FOLDER"
  fi
  trainer=(-m tst_jax.train "--config=${option[config]}" "--workdir=${option[workdir]}")
  trainer+=("${passed[@]}" --distributed)
  [ -z "${option[allow_changes]:-}" ] || trainer+=("--allow_changes=${option[allow_changes]}")
}

# check_copied: for scripts that copy the code elsewhere; `copied` is all that goes.
check_copied() {
  option[config]="${option[config]#"$root"/}"
  matches config 'configs/[^:]*(:.*)?' "one in configs/, which is copied; others are not there"
  copied=(tst_jax configs launch requirements.txt)
  if [ -n "${option[store]:-}" ]; then
    matches store 'gs://[^/]+/(.*[^/])' "a gs://BUCKET/FOLDER of a store that each machine copies"
  fi
}

# use_store FOLDER: of what --store copied, unless --config.data.store names stores inside it.
use_store() {
  [[ " ${passed[*]}" == *" --config.data.store="* ]] || trainer+=("--config.data.store=$1")
}

quoted() { # a command as one line that a shell reads back as it was
  local word line=()
  for word in "$@"; do
    if ! [[ "$word" =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then
      word="'${word//\'/\'\\\'\'}'"
    fi
    line+=("$word")
  done
  echo "${line[*]}"
}

# announce COMMAND...: shows what is about to run; false with --dry_run, where it is not to run.
announce() {
  if [ -n "${option[dry_run]:-}" ]; then
    quoted "$@" >&3
    return 1
  fi
  echo "+ $(quoted "$@")" >&4
}

# run COMMAND...: everything that these scripts start goes through here, or through announce().
run() {
  ! announce "$@" || "$@"
}
