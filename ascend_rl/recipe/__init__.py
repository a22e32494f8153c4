"""What a recipe is made of besides code: data, rewards, the tiny model, reports of runs and of rehearsals."""
