"""How long a step takes and what a switch would save, from models of time and published figures."""
