"""From parquet to KeyedJaggedTensor."""
