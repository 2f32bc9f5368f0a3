#!/bin/sh
# shoal-head CONFIG RUN [SETTING=VALUE...]: train, or resume where the run's folder is there already.
#
# A run that SIGTERM interrupted has saved a checkpoint and ended well. Whoever starts containers would call that done:
# the exit code 75 (a temporary failure) says that it is to be started again.
set -eu
config=$1
run=$2
shift 2
if [ -e "$run/config.yaml" ]; then
    set -- resume "$run" "$@"
else
    set -- train "$config" --run-dir "$run" "$@"
fi
trap 'kill -TERM "$head"' TERM INT
"${SHOAL:-shoal}" "$@" &
head=$!
code=0
wait "$head" || code=$?
while kill -0 "$head" 2> /dev/null; do  # a signal ended `wait`, and not the head
    code=0
    wait "$head" || code=$?
done
if [ "$code" = 0 ] && grep -q '"stopped_by": "interrupted"' "$run/summary.json"; then
    exit 75
fi
exit "$code"
