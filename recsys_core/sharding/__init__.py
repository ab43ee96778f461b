"""Who holds which rows: planner, plan file, sharder."""
