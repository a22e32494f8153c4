"""What a recipe is made of besides code: data, rewards, the tiny model, the report of a run."""
