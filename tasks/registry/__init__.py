"""MLflow: tracking, model registry, smoke test, champion gate and promotion."""
