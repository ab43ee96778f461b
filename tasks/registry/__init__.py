"""MLflow: tracking of runs, and registered versions with their tags and aliases."""
