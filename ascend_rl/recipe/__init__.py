"""What a recipe is made of besides code: data, rewards, the tiny model, step times, reports of runs."""
