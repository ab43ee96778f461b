"""The log ingest on Apache Spark."""
