"""Everything up to the exported drafter: targets, data, models, training, export."""
