"""Generating responses: which server gets which request, when requests move, the options of the engine."""
