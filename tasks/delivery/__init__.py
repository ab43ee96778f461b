"""Delivery of a new champion to other systems: events, recommendations, and items in vector stores."""
