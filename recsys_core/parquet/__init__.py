"""Input parquet: locations, schemas, guards against damaged files, and DuckDB sessions over them."""
