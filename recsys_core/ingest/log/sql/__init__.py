"""The steps of the log ingest in SQL that DuckDB and Spark execute."""
