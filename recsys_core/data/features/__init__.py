"""Features beyond ids: from parquet to arrays beside users, items and events."""
