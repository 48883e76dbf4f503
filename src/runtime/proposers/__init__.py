"""Where draft trees come from: one file per way of proposing."""
