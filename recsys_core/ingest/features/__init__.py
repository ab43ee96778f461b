"""Features of users, items and events: from parquet to arrays of embedding-table rows."""
