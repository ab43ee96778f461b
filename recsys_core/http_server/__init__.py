"""HTTP server of a retriever. It imports neither Prefect nor MLflow, and nothing of the training."""
