"""The interaction log: from parquet to vocabularies and the event store."""
