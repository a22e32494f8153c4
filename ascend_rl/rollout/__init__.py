"""Generating responses: which prompts, on which server, when requests move, the options of the engine."""
