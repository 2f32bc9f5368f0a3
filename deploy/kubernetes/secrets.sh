#!/bin/bash
# Certificates and a token as Secrets, for the head (named as its Service) and for the nodes:
#   deploy/kubernetes/secrets.sh | kubectl apply -f -
set -euo pipefail
SHOAL=${SHOAL:-shoal}
umask 077
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$SHOAL" node --init --folder "$folder/head" --name shoal-head > /dev/null
"$SHOAL" node --init --folder "$folder/head" --for "$folder/nodes" > /dev/null
rm "$folder/head/ca.key"  # no other machine is let in: to add one, make all of them again
for part in head nodes; do
    printf -- '---\napiVersion: v1\nkind: Secret\nmetadata:\n  name: shoal-trust-%s\n  labels: {app: shoal}\ntype: Opaque\ndata:\n' "$part"
    for file in "$folder/$part"/*; do
        printf '  %s: %s\n' "$(basename "$file")" "$(base64 -w 0 < "$file")"
    done
done
