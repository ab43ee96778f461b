"""The MLflow side: tracking, model registry, smoke test, gate and promotion."""
