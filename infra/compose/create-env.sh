#!/usr/bin/env bash
# Write infra/.env, which compose.yaml reads, with a new random value for each secret. An existing file is kept.
set -euo pipefail
file=$(dirname "$0")/../.env
[ ! -e "$file" ] || {
    echo "$file exists already; remove it to create new secrets" >&2
    exit 2
}
secret() { head --bytes 24 /dev/urandom | base64 | tr '+/' '-_'; }
umask 077
cat >"$file" <<SECRETS
POSTGRES_PASSWORD=$(secret)
PREFECT_DATABASE_PASSWORD=$(secret)
MLFLOW_DATABASE_PASSWORD=$(secret)
PREFECT_AUTH_STRING=nightjar:$(secret)
MLFLOW_PASSWORD=$(secret)
MLFLOW_SECRET_KEY=$(secret)
S3_ACCESS_KEY=nightjar
S3_SECRET_KEY=$(secret)
GRAFANA_PASSWORD=$(secret)
NIGHTJAR_SERVE_TOKEN=$(secret)
SECRETS
echo "wrote $file (mode 600)"
