"""What a run was told: switches, the shapes of models, and how settings that cannot work are refused."""
