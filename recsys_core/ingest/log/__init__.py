"""The interaction log: from parquet to vocabularies and the CSR event store."""
