"""The log ingest in DuckDB: out of core, on one machine."""
