#!/usr/bin/env bash
# Create a role and a database for each server. PostgreSQL's image runs this script once, with an empty data folder.
set -euo pipefail
psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --set prefect="$PREFECT_DATABASE_PASSWORD" --set mlflow="$MLFLOW_DATABASE_PASSWORD" <<'SQL'
CREATE ROLE prefect LOGIN PASSWORD :'prefect';
CREATE DATABASE prefect OWNER prefect;
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow';
CREATE DATABASE mlflow OWNER mlflow;
REVOKE CONNECT ON DATABASE prefect, mlflow FROM PUBLIC;
SQL
