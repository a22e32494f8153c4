"""What a run was told: switches, the shapes of models, and how incompatible settings are refused."""
