"""The hyperparameter search: Optuna study, trials, and their MLflow runs."""
