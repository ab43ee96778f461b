"""The data report: statistics, drift, leaks and limits of the ingested data."""
